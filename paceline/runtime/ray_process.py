"""Workers on the nodes of a Ray cluster: Ray finds room for them and starts them, and says when a node is lost.

An actor on the worker's node starts the very same process as `process.WorkerProcess` does here, and gives it a TCP
connection to the front end, on which the two speak as over a socket pair. Ray itself carries only what starts a worker,
and its exit code. A connection must say a token first, which a worker gets by way of Ray: whoever does not is dropped.
"""

import asyncio
import fcntl
import hmac
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from paceline.core.cluster import Parallel
from paceline.runtime import messages
from paceline.runtime.channel import FrontEnd
from paceline.runtime.launch import OnExit, OnMessage
from paceline.runtime.messages import Heartbeat, Shutdown
from paceline.runtime.process import LAST_WORDS_S
from paceline.runtime.pulse import Pulse

ANSWER_S = 5.0  # in which the cluster's address must answer
ROOM_S = 60.0  # in which it must have found room for all workers
POLL_S = 1.0
HELLO_S = 10.0  # in which who connects must have said its token
CUT_OFF_S = 30.0  # a worker whose front end cannot be reached for so long ends
TOKEN_BYTES = 32
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
# A worker must not outlive its actor, not even one that hangs: the kernel sees to it (PR_SET_PDEATHSIG, SIGKILL).
FATE = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


def ray() -> Any:
    """The library. Raises ValueError where it is not installed."""
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ValueError("--ray: needs Ray; install it with `pip install 'paceline[cluster]'`") from error
    return ray


# On a worker's node


class Host:
    """The actor: starts one worker and waits for its end."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, str, str]:
        """The node, and URLs on it at which workers of this node, or of all nodes, can meet."""
        address = ray().util.get_node_ip_address()
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        file = os.path.join(tempfile.gettempdir(), f"paceline-{secrets.token_hex(8)}")
        return ray().get_runtime_context().get_node_id(), f"file://{file}", f"tcp://{address}:{port}"

    def start(self, command: list[str], host: str, port: int, token: bytes) -> int:
        """Starts the worker and connects it to the front end; its process id. Raises OSError."""
        network = interface(ray().util.get_node_ip_address())  # gloo and NCCL would go by the host's name
        names = {"GLOO_SOCKET_IFNAME": network, "NCCL_SOCKET_IFNAME": network} if network else {}
        with socket.create_connection((host, port), timeout=HELLO_S) as link:
            link.settimeout(None)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * CUT_OFF_S))
            link.sendall(token)
            self.process = subprocess.Popen(
                [sys.executable, "-c", FATE, sys.executable, *command, str(link.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[link.fileno()],
                env={"OMP_WAIT_POLICY": "passive"} | names | os.environ,
                start_new_session=True,
            )
        return self.process.pid

    def wait(self) -> int:
        """The worker's exit code."""
        assert self.process is not None
        return self.process.wait()


def interface(address: str) -> str | None:
    """The name of the network interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


# At the front end


class Door:
    """Where workers come in: a listening socket, and the tokens by which they are known."""

    def __init__(self, host: str) -> None:
        self.host, self.port = host, 0
        self._expected: dict[bytes, FrontEnd] = {}
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Raises OSError."""
        if self._server is None:
            self._server = await asyncio.get_running_loop().create_server(lambda: Visitor(self), self.host, 0)
            self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._server:
            self._server.close()
            self._server = None

    def expect(self, channel: FrontEnd) -> bytes:
        """A token that opens the door once, to this channel."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._expected[token] = channel
        return token

    def forget(self, token: bytes) -> None:
        self._expected.pop(token, None)

    def enter(self, token: bytes) -> FrontEnd | None:
        known = next((one for one in self._expected if hmac.compare_digest(one, token)), None)
        return self._expected.pop(known) if known else None


class Visitor(asyncio.Protocol):
    """A connection of which nobody knows yet whose it is."""

    def __init__(self, door: Door) -> None:
        self._door, self._said = door, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._patience = asyncio.get_running_loop().call_later(HELLO_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._said += data
        if len(self._said) < TOKEN_BYTES:
            return
        self._patience.cancel()
        channel = self._door.enter(self._said[:TOKEN_BYTES])
        if channel is None:
            self._transport.abort()
            return
        self._transport.set_protocol(channel)
        channel.connection_made(self._transport)
        channel.data_received(self._said[TOKEN_BYTES:])

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()


class RayProcess:
    """A worker on another machine (`launch.Process`). It has ended when its connection has, or its actor."""

    def __init__(self, actor: Any, door: Door, command: Sequence[str], on_message: OnMessage, on_exit: OnExit) -> None:
        self.command = list(command)
        self.on_message, self.on_exit = on_message, on_exit
        self.pid = -1
        self._actor, self._door = actor, door
        self._channel = FrontEnd(self._receive)
        self.pulse = Pulse()
        self._killed = asyncio.Event()
        self._waiter: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.pulse = Pulse()
        await self._door.open()
        token = self._door.expect(self._channel)
        errors = ray().exceptions
        try:
            self.pid = await self._actor.start.remote(self.command, self._door.host, self._door.port, token)
        except errors.RayTaskError as error:  # the actor is there, and says why not
            self._door.forget(token)
            raise OSError(f"{error.cause} (from its node to {self._door.host}:{self._door.port})") from error
        except errors.RayError:  # the node is gone before the worker was there
            self._killed.set()
        self._waiter = asyncio.create_task(self._wait(token))

    def send(self, frame: bytes) -> None:
        self._channel.send(frame)

    def kill(self) -> None:
        """Waits for nobody: the node may be gone."""
        self._killed.set()
        ray().kill(self._actor)

    async def stop(self, patience_s: float = 5.0) -> None:
        self.on_exit = lambda process, code: None
        if self._waiter and not self._killed.is_set():
            self.send(messages.encode(Shutdown()))
            await asyncio.wait([self._waiter], timeout=patience_s)
        self.kill()
        if self._waiter:
            await self._waiter

    async def _wait(self, token: bytes) -> None:
        """Until the worker has ended, and for its last words."""
        code = asyncio.ensure_future(self._code())
        closed = asyncio.ensure_future(self._channel.closed.wait())
        killed = asyncio.ensure_future(self._killed.wait())
        await asyncio.wait([code, closed, killed], return_when=asyncio.FIRST_COMPLETED)
        if not self._killed.is_set():
            await asyncio.wait([code, closed], timeout=LAST_WORDS_S)
        for task in (closed, killed, code):
            task.cancel()
        self._door.forget(token)
        self._channel.abort()
        self.on_exit(self, code.result() if code.done() and not code.cancelled() else -1)

    async def _code(self) -> int:
        try:
            return int(await self._actor.wait.remote())
        except ray().exceptions.ActorUnavailableError:  # Ray cannot reach it now; its connection decides
            await asyncio.Event().wait()
            return -1
        except ray().exceptions.RayError:
            return -1

    def _receive(self, frame: bytes) -> None:
        message = messages.decode_from_worker(frame)
        self.pulse.heard(message)
        if not isinstance(message, Heartbeat):
            self.on_message(self, message)


class RayLauncher:
    """Room for the workers of one group in the fleet's placement group (`launch.Launcher`): an actor for each."""

    def __init__(self, cluster: "RayCluster", bundles: Sequence[int]) -> None:
        """`bundles`: of the placement group, by worker."""
        self.cluster, self.bundles = cluster, bundles
        self.reason, self.lost = "", False
        self._error = ""  # of an actor, until all are there or Ray has found out that a node is gone
        self.door = Door(cluster.host)
        self._actors: dict[int, Any] = {}
        self._places: dict[int, asyncio.Future[tuple[str, str, str]]] = {}  # of workers that are not started yet

    async def meeting(self, workers: int) -> str | None:
        try:
            return await self._meet(workers)
        except ray().exceptions.RayError as error:  # of Ray's own processes one is away
            self.reason, self.lost = silence(error), False
            await asyncio.sleep(POLL_S)
            return None

    async def _meet(self, workers: int) -> str | None:
        for number in range(workers):
            if number not in self._places:
                self._actors[number] = await asyncio.to_thread(self.cluster.actor, self.bundles[number])
                self._places[number] = asyncio.ensure_future(_result(self._actors[number].place.remote()))
        places = list(self._places.values())
        await asyncio.wait(places, timeout=POLL_S)
        if all(place.done() and not place.exception() for place in places):
            self.reason, self.lost, self._error, self._places = "", False, "", {}
            nodes, files, urls = zip(*(place.result() for place in places), strict=True)
            if workers == 1:
                return ""
            return str(files[0] if len(set(nodes)) == 1 else urls[0])  # on one node tensor ranks sum in shared memory
        for number, place in list(self._places.items()):
            if place.done() and (error := place.exception()):
                self._error = f"no worker starts in the cluster: {' '.join(str(error).splitlines()[-1:])}"
                del self._places[number]
                await asyncio.sleep(POLL_S)
        if lack := await asyncio.to_thread(self.cluster.lack):  # it was to be on a node that is gone
            self._error = ""
        self.reason = lack or self._error
        self.lost = self.reason != ""
        return None

    def process(self, number: int, command: Sequence[str], on_message: OnMessage, on_exit: OnExit) -> RayProcess:
        return RayProcess(self._actors.pop(number), self.door, command, on_message, on_exit)

    def close(self) -> None:
        self.door.close()
        for place in self._places.values():
            place.cancel()
        for actor in self._actors.values():
            ray().kill(actor)
        self._actors, self._places = {}, {}


def silence(error: Exception) -> str:
    return f"Ray does not answer: {str(error).splitlines()[0]}"


async def _result(reference: Any) -> Any:
    return await reference


class RayCluster:
    """A running cluster to which this process is connected; one at a time. To be closed."""

    def __init__(self, address: str) -> None:
        """`address`: HOST:PORT of the cluster's head, or auto: the one to which this machine belongs, which it must.

        Raises ValueError.
        """
        if "://" in address or not (address == "auto" or address.rpartition(":")[2].isdigit()):
            raise ValueError(f"--ray: {address!r} is not auto or HOST:PORT: this machine must be of the cluster itself")
        library = ray()
        try:
            head = library._private.services.canonicalize_bootstrap_address_or_die(address)
            host, _, port = head.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=ANSWER_S):  # Ray itself would try for minutes
                pass
            library.init(address=head, log_to_driver=False, logging_level="CRITICAL")
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"--ray: no answer from {address}: {str(error).splitlines()[0]}") from error
        # What happens to nodes it would print in many lines, and has no option against it.
        library._private.worker.print_to_stdstream = lambda *_, **__: None
        self.host = library.util.get_node_ip_address()
        self._group: Any = None
        self._device: dict[str, float] = {}

    def close(self) -> None:
        """Whatever still runs there of ours is ended."""
        ray().shutdown()

    def counts(self, device: dict[str, float]) -> list[int]:
        """How many devices of such resources each node has, free or not."""
        nodes = [node["Resources"] for node in ray().nodes() if node["Alive"]]
        return [min(int(node.get(name, 0.0) // amount) for name, amount in device.items()) for node in nodes]

    def devices(self, cores: int | None) -> int:
        """How many there are of so many cores; None: as many as the largest node has."""
        return sum(self.counts({"CPU": cores or max(self.counts({"CPU": 1}), default=1)}))

    def cores(self, devices: int, gpus: bool = False) -> int:
        """Cores for each of so many devices, beside a GPU, so that they have as many as there are."""
        beside: dict[str, float] = {"GPU": 1} if gpus else {}
        cores = max(self.counts({"CPU": 1}), default=0)
        while cores > 1 and sum(self.counts({"CPU": cores, **beside})) < devices:
            cores -= 1
        return max(1, cores)

    def reserve(self, shapes: Sequence[Parallel], device: dict[str, float], per_node: int) -> list[RayLauncher]:
        """Room for groups of such shapes, whose devices are of such resources. Ranks of a stage, up to `per_node` of
        them, are on one node where they fit. Raises ValueError where the cluster has too few devices."""
        counts, needed = self.counts(device), sum(shape.devices for shape in shapes)
        what = " ".join(f"{name}:{amount:g}" for name, amount in device.items())
        if needed > sum(counts):
            raise ValueError(f"--ray: {needed} devices of {what} are needed, the cluster has {sum(counts)}")
        width = max(1, min(per_node, max(counts)))
        sizes = [bundle_sizes(shape, width) for shape in shapes]
        if not fit([size for group in sizes for size in group], counts):
            sizes = [bundle_sizes(shape, 1) for shape in shapes]
        bundles = [{name: size * amount for name, amount in device.items()} for group in sizes for size in group]
        self._device, self._group = device, ray().util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(ROOM_S):
            raise ValueError(f"--ray: of {sum(counts)} devices of {what} not {needed} were free within {ROOM_S:.0f} s")
        launchers, begin = [], 0
        for group in sizes:
            numbers = [begin + index for index, size in enumerate(group) for _ in range(size)]
            launchers.append(RayLauncher(self, numbers))
            begin += len(group)
        return launchers

    def instead(self, shapes: Sequence[Parallel], old: Sequence[RayLauncher]) -> list[RayLauncher]:
        """Launchers of groups of such shapes on the devices that old ones have, the first of them, except where a
        node was lost. Raises ValueError where those are too few, OSError where Ray does not answer."""
        try:
            alive = {node["NodeID"] for node in ray().nodes() if node["Alive"]}
            nodes = ray().util.placement_group_table(self._group)["bundles_to_node_id"]
        except ray().exceptions.RayError as error:
            raise OSError(silence(error)) from error
        there = [bundle for one in old for bundle in one.bundles if nodes.get(bundle) in alive]
        needed = sum(shape.devices for shape in shapes)
        if needed > len(there):
            raise ValueError(f"--ray: {needed} devices are needed, {len(there)} are left")
        devices = iter(there)
        return [RayLauncher(self, [next(devices) for _ in range(shape.devices)]) for shape in shapes]

    def actor(self, bundle: int) -> Any:
        """Starts an actor in a bundle of the reserved ones, as soon as that has a node."""
        strategies = ray().util.scheduling_strategies
        there = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        resources = {"num_cpus": self._device.get("CPU", 0), "num_gpus": self._device.get("GPU", 0)}
        return ray().remote(Host).options(scheduling_strategy=there, max_restarts=0, **resources).remote()

    def lack(self) -> str:
        """Why not all that was reserved is there."""
        state = ray().util.placement_group_table(self._group)["state"]
        return "" if state == "CREATED" else "a node was lost; waiting for one with room"


def bundle_sizes(shape: Parallel, width: int) -> list[int]:
    """Devices of the bundles of a group: those of a stage together, at most `width`."""
    stage = [min(width, shape.tensor - begin) for begin in range(0, shape.tensor, width)]
    return stage * shape.pipeline


def fit(sizes: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether bundles of such sizes find room on nodes of so many devices, largest first."""
    free = list(counts)
    for size in sorted(sizes, reverse=True):
        most = max(range(len(free)), key=free.__getitem__)
        if free[most] < size:
            return False
        free[most] -= size
    return True

