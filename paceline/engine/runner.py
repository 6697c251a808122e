"""A model, or a worker's part of it: keeps sequences and the KV pool, runs steps. Satisfies `core.work.Engine`.

A step is: forget and learn sequences, one forward pass over all slices, logits of the rows that need them, sampling.
A fault that belongs to one sequence is that sequence's answer; the others of the step do not notice. In a group of
several workers all take the same steps, worker 0 drafts, and one samples (`parallel`); a fault of a pass, after which
they would not understand each other, ends the worker.
"""

import gc
import sys
from array import array
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from paceline.core.drafter_name import ERROR
from paceline.core.work import EngineInfo, NewSequence, SliceOutput, SliceWork
from paceline.engine import attention, gpu, load_plan, machine, pages, sampler, verdict
from paceline.engine.attention import SliceSpan
from paceline.engine.begun import NO_DISTRIBUTION, Begun
from paceline.engine.config import ModelConfig
from paceline.engine.draft_models import DecoderModel, DraftModel, chains
from paceline.engine.drafters import Drafter, InTurn, PromptLookup, TokenByToken, TrigramModel, most_kept
from paceline.engine.fused import FusedStep
from paceline.engine.gpu import PagedCache
from paceline.engine.grammar import Grammars
from paceline.engine.job import EngineSequence, Job, in_parts
from paceline.engine.kv_cache import KVCache, kv_dtype
from paceline.engine.linear import kernels
from paceline.engine.load_plan import LOGIT_ROWS
from paceline.engine.model import Decoder, Progress
from paceline.engine.parallel import Peers, Place
from paceline.engine.sampler import SamplingState
from paceline.speculation import ngram


class ModelRunner:
    """A loaded model. `step` is to be called from one thread."""

    by_block = True  # what was drafted with a distribution is verified as a block, else token by token

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache | PagedCache,
        info: EngineInfo,
        grammars: Grammars,
        device: str = "cpu",
        peers: Peers | None = None,
    ):
        self.decoder, self.cache, self.info, self.device, self.peers = decoder, cache, info, device, peers
        place = peers.place if peers else Place()
        self.first, self.last = place.first, place.last
        self.drafts, self.answers = place.number == 0, place.number == place.answers
        self.caches = [cache]  # that of a draft model too
        self.sequences: dict[int, EngineSequence] = {}
        self.drafter: Drafter = PromptLookup()
        self.grammars = grammars
        self.draft_s = 0.0
        self.finished = 0.0  # when the last step was
        self._open: Begun | None = None  # the step begun last, if only the device knows its tokens
        self._complaints: set[str] = set()
        self._progress = np.zeros(1, np.int64)
        self.fused = FusedStep.of(decoder, cache, self._progress) if peers is None else None

    @property
    def progress(self) -> int:
        return int(self._progress[0]) + self.grammars.compiled + (kernels.moved() if kernels else 0)

    @property
    def waiting(self) -> bool:
        return self.peers is not None and self.peers.waiting

    @property
    def overlaps(self) -> bool:
        """Whether steps can begin before the last one is finished: a device computes them, and nobody else drafts."""
        return self.device != "cpu" and self.peers is None and isinstance(self.drafter, PromptLookup)

    @staticmethod
    def load(
        path: Path | str,
        *,
        max_batch_tokens: int,
        max_batch: int,
        device: str = "cpu",
        memory: int | None = None,
        num_blocks: int | None = None,
        most_blocks: int | None = None,
        block_size: int = 16,
        context: int | None = None,
        threads: int | None = None,
        quantization: str = "none",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        drafter: str = "ngram",
        early_exit_layers: int | None = None,
        draft_quantization: str | None = None,
        share: float = 1.0,
        reserve: int = 0,
        lent: int | None = None,
        peers: Peers | None = None,
        progress: Progress = lambda done, total: None,
    ) -> "ModelRunner":
        """Loads a checkpoint directory and plans its memory before the weights are read.

        `memory` is bytes for the whole process, None what the machine has left; `num_blocks` fixes the KV pool, which
        else takes this `share` of what is left, but for `reserve` bytes. With `lent` the model shares one pool with
        others on the device, of which those loaded before it have so many bytes: beside its own blocks there are
        addresses for as many as the others may lend it (`most_blocks`), and no block takes memory before it is written.
        This takes blocks of whole pages on a CPU, else its part is fixed. `context` is the most tokens of a sequence,
        None what the model and the pool can hold; `quantization` is one of `config.QUANTIZATIONS`, `dtype` auto or one
        of `config.DTYPES`, `kv_cache_dtype` auto or, on a CPU, of `config.KV_DTYPES`. On a GPU memory is the device's,
        and blocks are of the size that attention takes. `drafter` is a `DrafterName`; a model's path is its directory,
        its memory is planned with the rest, and `draft_quantization` is its own, None: the target's; early exit is
        behind `early_exit_layers`, None: a quarter of them. With `peers` it is this worker's part of the model; draft
        models, and the first layers for early exit once more, are with worker 0. Raises ModelError.
        """
        machine.require(device)
        place = peers.place if peers else Place()
        models = load_plan.models(
            Path(path), (quantization, draft_quantization), (device, dtype, kv_cache_dtype), context, drafter,
            early_exit_layers, place,
        )  # fmt: skip
        kinds = list(zip(models.parts, models.precisions, strict=True))
        if device != "cpu":
            block_size = gpu.block_size(device, [(kv_dtype(kind), part.config.head_dim) for part, kind in kinds])
        machine.use_threads(threads)
        for part, kind in kinds:
            if part.layers:
                _warm_up(part.config, block_size, device, kv_dtype(kind))
        if device == "cpu" and (models.drafts.kind == "early_exit" or len(models.parts) > 1):
            chains()
        config, drafts = models.configs[0], models.drafts
        grammars = Grammars(models.tokenizer, config.vocab_size, models.eos_ids)
        info = load_plan.plan(
            models, max_batch_tokens=max_batch_tokens, max_batch=max_batch, device=device, memory=memory,
            num_blocks=num_blocks, most_blocks=most_blocks, block_size=block_size, context=context, share=share,
            reserve=reserve, lent=lent, peers=peers,
        )  # fmt: skip
        decoders, fault = models.load(device, peers, progress)
        if fault:
            info, kinds = replace(info, undrafted=fault), kinds[:1]
            print(f"{path}: steps go without drafts, for the draft model cannot be loaded: {fault}", file=sys.stderr)
        pages.trim_heap()
        pages.keep_heap()
        blocks = info.most_blocks or info.num_blocks, block_size
        caches: list[KVCache | PagedCache] = [
            KVCache(part.config, *blocks, bool(info.block_bytes), kv_dtype(kind)) if device == "cpu"
            else PagedCache(part.config, *blocks, device, kv_dtype(kind))
            for part, kind in kinds
        ]  # fmt: skip
        runner = ModelRunner(decoders[0], caches[0], info, grammars, device, peers)
        runner.caches = caches.copy()
        runner.drafts = runner.drafts and not fault
        kept = most_kept(config.vocab_size)
        if len(decoders) > 1:
            model = DecoderModel(decoders[1], caches[1], runner._progress, models.vocabulary)
            runner.drafter = DraftModel(model, LOGIT_ROWS, kept, max_batch_tokens, ngram.propose, drafts.kind)
        elif drafts.kind == "early_exit":
            decoders.append(decoders[0].first(models.exit_layers))
            caches.append(caches[0].first(models.exit_layers))
            model = DecoderModel(decoders[1], caches[1], runner._progress)
            runner.drafter = TokenByToken(model, LOGIT_ROWS, kept, ngram.propose, drafts.kind)
        elif models.table is not None:
            runner.drafter = TokenByToken(TrigramModel(models.table, device), LOGIT_ROWS, kept, name=drafts.kind)
        if device != "cpu":
            with torch.inference_mode():
                for decoder, cache in zip(decoders, caches, strict=True):
                    decoder.record(cache, max_batch, max_batch_tokens, info.context)
        if drafts.lookup:
            runner.drafter = InTurn(PromptLookup(), runner.drafter)
        return runner

    def give_back(self, blocks: Seq[int]) -> None:
        """Returns the memory of these blocks to the system; their content is lost."""
        for cache in self.caches:
            cache.give_back(blocks)

    def release(self) -> None:
        """Gives its memory back; it is not used any more."""
        del self.decoder, self.cache, self.caches, self.drafter, self.fused
        gc.collect()
        pages.trim_heap()

    def step(
        self, new: Seq[NewSequence], slices: Seq[SliceWork], dropped: Seq[int]
    ) -> tuple[list[SliceOutput], float, float]:
        """Forgets `dropped`, learns `new`, runs `slices`: outputs in order, seconds of forward pass and of sampling
        (but for what is drawn or judged in the same call as the pass)."""
        self.learn(new, dropped)
        return self.begin(slices).finish()

    def learn(self, new: Seq[NewSequence], dropped: Seq[int]) -> None:
        """Forgets `dropped`, learns `new`, which the next step may run."""
        for name in dropped:
            self.sequences.pop(name, None)
        for sequence in new:
            self._learn(sequence)

    def follows(self, slices: Seq[SliceWork]) -> bool:
        """Whether a step of these slices can begin, and not wait for the device, before the last one is finished."""
        known = (self.sequences.get(work.id) for work in slices if not work.num_draft)
        return sum(sequence is not None and _is_plain(sequence) for sequence in known) == len(slices)

    @torch.inference_mode()
    def begin(self, slices: Seq[SliceWork]) -> Begun:
        """As `step`, until the device has been asked for all of it, or has computed it where its tokens depend on each
        other, or on those of the last step in more than what there is to look up."""
        started, waited = perf_counter(), self.peers.waited_s if self.peers else 0.0
        jobs = [Job(work) for work in slices]
        for job in jobs:
            self._prepare(job)
        runs = [job for job in jobs if job.runs]
        plain = self.overlaps and all(_is_plain(job.sequence) and not job.work.num_draft for job in runs)
        self._draft(runs, started)
        if self.fused is not None and self.fused.takes(runs) and (begun := self._in_one_call(jobs, runs, started)):
            return begun
        hidden = self._forward(runs)
        if self.peers:
            machine.finish(self.device)  # nobody waits for what has only been asked for
        if plain:  # what was before the pass is the host's preparation, beside the device's last step
            self.draft_s = 0.0
        begun = Begun(self, jobs, started, waited, self.draft_s)
        if self.last:
            begun.computed = machine.Moment(self.device)
            begin = 0
            for job in (job for job in runs if job.runs):
                job.begin = begin
                begin += job.span.what_is_read.length
            self._prompt_logprobs([job for job in runs if job.runs], hidden)
            emitting = [job for job in runs if job.runs and job.work.emits]
            asked = [job for job in emitting if not job.error]
            if emitting and not (plain and self._ask(begun, asked, hidden)):
                self._settle()
                begun.heads = self._emit(emitting, hidden)
            begun.sampled = machine.Moment(self.device)
        elif hidden.shape[0]:
            self.peers.send(hidden)
        return begun

    def _learn(self, new: NewSequence) -> None:
        config, eos_ids, state, fault = self.decoder.config, self.grammars.eos_ids, None, ""
        try:
            if self.answers or self.drafts:
                grammar = None
                if new.params.grammar:
                    grammar = self.grammars.of(new.params.grammar)
                prompt, generated = new.tokens[: new.num_prompt], new.tokens[new.num_prompt :]
                state = SamplingState(new.params, config.vocab_size, eos_ids, prompt, generated, grammar)
        except Exception as error:  # parameters that the sampler cannot take are this sequence's fault alone
            fault = f"{type(error).__name__}: {error}"
        stops = new.params.stops(eos_ids)
        tokens = array("q", new.tokens)
        self.sequences[new.id] = EngineSequence(tokens, new.num_prompt, stops, new.params, state, fault)

    def _prepare(self, job: Job) -> None:
        """Updates the sequence and checks the slice. One that could not be learnt is computed like others, for all
        workers have to run the same slices."""
        work, sequence = job.work, self.sequences.get(job.work.id)
        if sequence is None:
            job.error = f"sequence {work.id} is not known"
            return
        job.sequence = sequence
        if not self.answers:
            self._catch_up(job)
        sequence.blocks[work.first_block :] = array("q", work.blocks)
        end, vocabulary, blocks = job.end, self.decoder.config.vocab_size, self.cache.num_blocks
        known = len(sequence.tokens) + (sequence.awaited is not None)
        if not 0 <= work.start < end <= known:
            job.error = f"tokens [{work.start}, {end}) of {known} known"
        elif work.emits and end != known:
            job.error = f"emits after token {end} of {known} known"
        elif len(sequence.blocks) * self.info.block_size < work.start + work.length:
            job.error = f"{len(sequence.blocks)} blocks are too few for {work.start + work.length} tokens"
        elif work.blocks and not (min(work.blocks) >= 0 and max(work.blocks) < blocks):
            job.error = f"block ids must be from 0 to {blocks - 1}"
        elif (some := sequence.tokens[work.start : end]) and not (min(some) >= 0 and max(some) < vocabulary):
            job.error = f"token ids must be from 0 to {vocabulary - 1}"
        else:
            job.runs, job.error = True, sequence.fault

    def _catch_up(self, job: Job) -> None:
        """With tokens that another worker sampled."""
        sequence, fresh = job.sequence, job.work.fresh
        sequence.tokens.extend(fresh)
        if self.drafts and fresh and not sequence.fault:
            for token in fresh:
                sequence.state.observe(token)
            if job.work.first_block or not job.work.blocks:  # else those that it had are others' by now
                self.drafter.settle([job])

    def _draft(self, jobs: list[Job], started: float) -> None:
        """Has tokens drafted, and says which rows there are to compute. Without a draft a step is as good as ever."""
        if self.drafts:
            drafted_for = [job for job in jobs if not job.error]
            try:
                self.drafter.propose(drafted_for)
            except Exception as error:
                self._complain(f"steps go without drafts: {type(error).__name__}: {error}")
                for job in drafted_for:
                    job.draft, job.draft_rows, job.drafter = [], [], ERROR
        self.draft_s = perf_counter() - started
        if self.peers:
            self.draft_s = self.peers.share_drafts(jobs, self.draft_s, self.decoder.config.vocab_size)
        for job in jobs:
            length, read = job.end + len(job.draft) - job.work.start, None
            if self.last and job.sequence.params.prompt_logprobs is None:
                read = 1 + len(job.draft) if job.work.emits else 0
            job.span = SliceSpan(job.work.start, length, job.sequence.blocks, bool(job.draft), read)

    def _in_one_call(self, jobs: list[Job], runs: list[Job], started: float) -> Begun | None:
        """The whole step; None where it failed."""
        try:
            logits, drawn = self.fused(runs, self.by_block)
        except Exception as error:  # part by part whose fault it is will be found out
            self._complain(f"a step is asked for part by part: {type(error).__name__}: {error}")
            return None
        begun = Begun(self, jobs, started, 0.0, self.draft_s)
        begun.computed = machine.Moment(self.device)
        for job, tokens in drawn:
            self._take(job, tokens, logits)
        self._choose([job for job in runs if job.work.emits and job.sequence.state.penalties.active], logits)
        self._tick()
        begun.sampled = machine.Moment(self.device)
        return begun

    def _take(self, job: Job, tokens: list[int], logits: Tensor) -> None:
        """Emits the first of these tokens, drawn from the job's rows, and each that was drawn behind the one before."""
        for row, token in enumerate(tokens, job.first_row):
            if token < 0:
                job.error = NO_DISTRIBUTION
                return
            logprob = None
            if job.sequence.params.logprobs is not None:
                try:
                    [logprob] = sampler.logprobs(logits[row : row + 1], [job.sequence.state], [token])
                except Exception as error:
                    job.error = f"{type(error).__name__}: {error}"
                    return
            if not job.take(token, logprob):
                return

    def _complain(self, text: str) -> None:
        """Once."""
        if text not in self._complaints:
            self._complaints.add(text)
            print(text, file=sys.stderr)

    def _forward(self, jobs: list[Job]) -> Tensor:
        """Hidden states [tokens, hidden] of what is read of the jobs, one after the other, without those that get an
        error.

        Where several fail together, each is run alone: a pass writes only the keys and values of its own slices.
        """
        if not jobs:
            return torch.empty(0, self.decoder.config.hidden, dtype=self.decoder.dtype, device=self.device)
        try:
            decoder, progress = self.decoder, self._progress
            plan = decoder.plan([job.span for job in jobs], self.info.block_size)
            if not self.first:
                rows = sum(job.span.length for job in jobs)
                x = self.peers.receive(rows, decoder.config.hidden, decoder.dtype)
                return decoder.run(x, plan, self.cache, progress)
            return decoder.forward(self._ids(jobs), plan, self.cache, progress)
        except Exception as error:
            if self.peers:
                raise
            if len(jobs) > 1:
                # each in memory of its own: what a graph yields holds until the next pass
                return torch.cat([self._forward([job]).clone() for job in jobs])
            jobs[0].runs, jobs[0].error = False, f"{type(error).__name__}: {error}"
            return self._forward([])

    def _ids(self, jobs: list[Job]) -> Tensor:
        """Token ids of the jobs, one after the other; on the device, where it alone knows some of them."""
        ids, awaited, rows = list[int](), list[int](), list[int]()
        for job in jobs:
            sequence, span = job.sequence, job.span
            ids += sequence.tokens[span.start :][: span.length]
            ids += job.draft
            if sequence.awaited is not None and job.end > len(sequence.tokens):
                awaited.append(len(ids))
                rows.append(sequence.row)
                ids.append(0)
        if not awaited:
            return torch.tensor(ids)
        fed = self._open.fed
        some = fed if rows == list(range(len(fed))) else fed.index_select(0, self._there(rows))
        return some if len(awaited) == len(ids) else self._there(ids).index_copy_(0, self._there(awaited), some)

    def _there(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers).to(self.device, non_blocking=True)

    def _tick(self) -> None:
        self._progress[0] += 1

    def _prompt_logprobs(self, jobs: list[Job], hidden: Tensor) -> None:
        """Of prompt tokens [start + 1, end + 1), for sequences that asked."""
        for job in jobs:
            sequence, start = job.sequence, job.span.start
            if sequence.params.prompt_logprobs is None:
                continue
            targets = sequence.tokens[start + 1 : min(start + job.span.length + 1, sequence.num_prompt)].tolist()
            for begin in range(0, len(targets), LOGIT_ROWS):
                some = targets[begin : begin + LOGIT_ROWS]
                logits = self.decoder.logits(hidden[job.begin + begin :][: len(some)])
                self._tick()
                if logits is None or job.error:
                    continue
                try:
                    job.prompt_logprobs += sampler.prompt_logprobs(logits, some, sequence.params.prompt_logprobs)
                except Exception as error:
                    job.error = f"{type(error).__name__}: {error}"

    def _settle(self) -> None:
        """Has the last step's tokens known here."""
        if self._open:
            self._open.take()
            self._open = None

    def _ask(self, begun: Begun, jobs: list[Job], hidden: Tensor) -> bool:
        """Has the device sample a token for each of the jobs, which are plain and without drafts. False: it cannot."""
        if not jobs:
            return False
        heads, parts = [], []
        try:
            for some in in_parts(jobs, LOGIT_ROWS, lambda job: 1):
                logits, head = self._logits(some, hidden)
                parts.append(sampler.asked(logits, [job.sequence.state for job in some], [job.end for job in some]))
                heads.append(head)
        except Exception:  # `_emit` finds out whose fault it is
            return False
        tokens = torch.cat(parts)
        begun.heads, begun.asked = heads, jobs
        begun.fed, begun.tokens = tokens.clamp(min=0), tokens.to("cpu", non_blocking=True)
        for row, job in enumerate(jobs):
            job.sequence.awaited, job.sequence.row = begun, row
        self._open = begun
        self._tick()
        return True

    def _logits(self, jobs: list[Job], hidden: Tensor) -> tuple[Tensor | None, tuple[machine.Moment, machine.Moment]]:
        """Of the jobs' last tokens and drafts, one behind the other, and when they were computed."""
        started, rows = machine.Moment(self.device), []
        for job in jobs:
            job.first_row, end = len(rows), job.begin + job.span.what_is_read.length
            rows += range(end - 1 - len(job.draft), end)
        logits = self.decoder.logits(
            hidden if len(rows) == len(hidden) else hidden.index_select(0, self._there(rows))
        )
        return logits, (started, machine.Moment(self.device))

    def _emit(self, jobs: list[Job], hidden: Tensor) -> list[tuple[machine.Moment, machine.Moment]]:
        """Tokens for each job: one, and what stays of its draft. Returns when logits were computed.

        A draft that was drawn at random, for a request that nobody seeded, is judged by rejection. All else is coupled
        (Daliri et al., 2024): every row is sampled as without a draft, with the noise of its position and after the
        tokens before it, and the next one counts as long as the token is the one drafted: what is emitted is the same.
        """
        heads = []
        for some in in_parts(jobs, LOGIT_ROWS, lambda job: 1 + len(job.draft)):
            logits, head = self._logits(some, hidden)
            heads.append(head)
            if logits is not None:
                self._choose([job for job in some if not job.error], logits)
            self._tick()
        return heads

    def _choose(self, jobs: list[Job], logits: Tensor) -> None:
        self._judge([job for job in jobs if job.draft_rows], logits)
        some = [job for job in jobs if not job.draft_rows]
        while some:
            index = [job.first_row + len(job.tokens) for job in some]
            together = index[-1] - index[0] == len(index) - 1  # nothing has to be copied
            some = self._sample(some, logits[index[0] : index[-1] + 1] if together else logits[index])

    def _judge(self, jobs: list[Job], logits: Tensor) -> None:
        """What stays of drafts that were drawn from `draft_rows`, and a token behind it (`speculation.rejection`)."""
        if not jobs:
            return
        try:
            verdicts = verdict.judged(jobs, logits, self.by_block)
        except Exception as error:
            self._complain(f"a verdict failed: {type(error).__name__}: {error}")
            for job in jobs if len(jobs) > 1 else ():
                self._judge([job], logits)
            if len(jobs) == 1:  # as if nothing had been drafted
                job = jobs[0]
                job.draft, job.draft_rows, job.drafter = [], [], ERROR
                self._sample([job], logits[job.first_row : job.first_row + 1])
            return
        for job, (kept, last) in zip(jobs, verdicts, strict=True):
            self._take(job, [*job.draft[:kept], last], logits)

    def _sample(self, jobs: list[Job], logits: Tensor) -> list[Job]:
        """A token for each of the jobs, from its row of logits; those whose next row counts too."""
        states = [job.sequence.state for job in jobs]
        positions = [len(job.sequence.tokens) for job in jobs]
        try:
            tokens, logprobs = sampler.sample(logits, states, positions)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].error = f"{type(error).__name__}: {error}"
                return []
            return [one for row, job in enumerate(jobs) for one in self._sample([job], logits[row : row + 1])]
        going = []
        for job, token, logprob in zip(jobs, tokens, logprobs, strict=True):
            if token < 0:
                job.error = NO_DISTRIBUTION
            elif job.take(token, logprob):
                going.append(job)
        return going


def _is_plain(sequence: EngineSequence) -> bool:
    """Whether its next token is drawn from the logits as they are, and nobody wants to know more about them."""
    params, state = sequence.params, sequence.state
    return params.logprobs is None and params.prompt_logprobs is None and not (state and state.penalties.active)


def _warm_up(config: ModelConfig, block_size: int, device: str, dtype: torch.dtype) -> None:
    """Runs every kind of operation once on small tensors: libraries are loaded and kernels compiled before memory is
    measured and before the first request waits for it."""
    if device == "cpu":
        attention.warm_up(config, block_size)
    else:
        gpu.warm_up(config.first(1), block_size, device, dtype)
    sampler.warm_up(config.vocab_size, device)
    verdict.warm_up(config.vocab_size, device)
