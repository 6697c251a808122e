"""A step that a device has been asked for, and that may not have been computed yet."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.core.work import Outcome
from paceline.engine.job import Job
from paceline.engine.machine import Moment

if TYPE_CHECKING:
    from paceline.engine.runner import ModelRunner

NO_DISTRIBUTION = "the model gave no distribution (logits are NaN or infinite)"


@dataclass(slots=True, eq=False)
class Begun:
    """What `ModelRunner.begin` leaves behind; `finish` is to be called once, in the order in which steps began.

    Its tokens may be known to the device alone until then. The next step can begin meanwhile: what it computes for a
    sequence's last token it takes from there.
    """

    runner: "ModelRunner"
    jobs: Seq[Job]
    started: float
    waited: float  # seconds for other workers, until it started
    draft_s: float = 0.0
    computed: Moment | None = None  # the pass; None: nothing was sampled here
    sampled: Moment | None = None
    heads: list[tuple[Moment, Moment]] = field(default_factory=list)  # of the passes' logits
    asked: Seq[Job] = ()  # whose tokens the device has
    tokens: Tensor | None = None  # int64 [asked], on their way to the host
    fed: Tensor | None = None  # on the device, what a pass can look up

    @property
    def done(self) -> bool:
        """Whether `finish` does not wait for the device."""
        return self.sampled is None or self.sampled.passed

    def take(self) -> None:
        """Has its tokens known here; waits for the device."""
        if self.tokens is None or self.sampled is None:
            return
        self.sampled.wait()
        for job, token in zip(self.asked, self.tokens.tolist(), strict=True):
            if job.sequence.awaited is self:
                job.sequence.awaited = None
            if token < 0:
                job.error = NO_DISTRIBUTION
            else:
                job.take(token, None)
        self.tokens = None

    def finish(self) -> Outcome:
        """The step's outputs, as `ModelRunner.step` returns them."""
        runner, sampling = self.runner, 0.0
        if self.computed and self.sampled:
            sampling = self.computed.until(self.sampled) - sum(begin.until(end) for begin, end in self.heads)
        self.take()
        if runner.drafts and runner.answers:
            runner.drafter.settle([job for job in self.jobs if not job.error])
        now = perf_counter()
        seconds = now - max(self.started, runner.finished)  # of steps side by side each has its own
        sampling = min(sampling, seconds)  # the device may have been done before anybody looked
        forward, runner.finished = seconds - sampling, now
        if runner.peers:
            forward -= runner.peers.waited_s - self.waited
            if not runner.drafts:  # another worker did
                forward += self.draft_s
        return [job.output() for job in self.jobs] if runner.answers else [], forward, sampling
