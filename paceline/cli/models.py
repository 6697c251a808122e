"""The models that are to be served: found, their tokenizers read, their profiles measured where a goal needs one."""

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.batching.budget import GoalBudget
from paceline.cli import fleet_file, profile_cache
from paceline.cli.accelerators import Accelerator, DType, KVDType
from paceline.cli.drafting import Drafting
from paceline.cli.fleet_file import Quantization
from paceline.cli.fleet_profile import measured_here
from paceline.cli.goals import goal_budget
from paceline.cli.planning import text_steps, text_times
from paceline.cli.profile_file import PlanningProfile
from paceline.cli.sources import default_name, resolve
from paceline.core.request import NO_SLO, SLO
from paceline.engine.config import PRECISIONS, ModelConfig
from paceline.engine.encoder_config import EncoderConfig, is_encoder
from paceline.engine.precision import Precision, precision
from paceline.engine.tokenizer import Tokenizer
from paceline.latency.profile import Profile
from paceline.latency.step_time import StepTime


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    path: Path
    tokenizer: Tokenizer
    quantization: Quantization = "none"
    slo: SLO = NO_SLO
    device: Accelerator = "cpu"
    dtype: DType = "auto"
    kv_cache_dtype: KVDType = "auto"
    profile: Profile | None = None
    step_time: StepTime | None = None  # None: nobody has measured it
    budget: GoalBudget | None = None  # None: as wide as the token budget, always
    drafting: Drafting = Drafting()
    draft_profile: Profile | None = None
    encoder: EncoderConfig | None = None  # None: it generates

    @property
    def precision(self) -> Precision:
        """Encoders are in float32 on a GPU, too. Raises ValueError."""
        if self.encoder:
            return precision(self.device, "float32", self.quantization, self.path)
        return precision(self.device, self.dtype, self.quantization, self.path, self.kv_cache_dtype)

    @property
    def draft_precision(self) -> Precision:
        """Of a draft model. Raises ValueError."""
        if self.drafting.model is None:
            return self.precision
        quantization = self.drafting.quantized(self.quantization)
        key = "speculation.quantization"
        return precision(self.device, self.dtype, quantization, self.drafting.model, self.kv_cache_dtype, key)

    def check_precision(self) -> None:
        """Raises ValueError for what the device cannot compute in."""
        for one in (self.precision, self.draft_precision):
            assert one.weights in PRECISIONS


def is_fleet_file(sources: list[str]) -> bool:
    return len(sources) == 1 and sources[0].endswith((".yaml", ".yml"))


def find_models(
    sources: list[str], names: list[str], quantization: Quantization = "none", slo: SLO = NO_SLO,
    device: Accelerator = "cpu", dtype: DType = "auto", kv_cache_dtype: KVDType = "auto",
) -> list[Model]:  # fmt: skip
    """Resolves all sources before anything is loaded; `names`, `quantization`, `kv_cache_dtype` and `slo` are for those
    that a fleet file does not name. Raises ValueError naming the source, or what the device cannot compute in."""
    if is_fleet_file(sources):
        if quantization != "none" or kv_cache_dtype != "auto" or slo != NO_SLO or names:
            raise ValueError(
                "quantization, kv-cache-dtype, tbt-goal, served-model-name: with a fleet file they are keys of its "
                "models: quantization, kv_cache_dtype, slo, name"
            )
        entries = fleet_file.load(Path(sources[0])).models
    else:
        goals = fleet_file.Goals.model_construct(ttft=slo.ttft, tbt=slo.tbt)
        entries = [
            fleet_file.Entry.model_construct(
                name=default_name(source), source=source, quantization=quantization, kv_cache_dtype=kv_cache_dtype,
                slo=goals,
            )  # fmt: skip
            for source in sources
        ]
    if len(names) > len(entries):
        raise ValueError(f"served-model-name: {len(names)} names for {len(entries)} models")
    models = []
    for index, entry in enumerate(entries):
        if entry.source.startswith("profile:"):
            raise ValueError(f"source: {entry.source!r} is known by its profile only; it can be planned, not served")
        path, name = resolve(entry.source), names[index] if index < len(names) else entry.name
        goals = SLO(entry.slo.ttft, entry.slo.tbt, entry.slo.deadline)
        encoder = EncoderConfig.load(path) if is_encoder(path) else None
        check_goals(name, encoder is not None, goals, entry.speculation.drafter)
        fleet_file.check_cache(entry, encoder is not None)
        model = Model(
            name, path, Tokenizer.load(path), entry.quantization, goals, device, dtype, entry.kv_cache_dtype,
            encoder=encoder,
        )  # fmt: skip
        model = replace(model, drafting=Drafting.of(entry.speculation, device))
        model.check_precision()
        if model.drafting.drafter.kind == "early_exit":
            ModelConfig.load(path).exit_layers(model.drafting.early_exit_layers)  # refused before anything is measured
        models.append(model)
    twice = [m.name for m in models if [n.name for n in models].count(m.name) > 1]
    if twice:
        raise ValueError(f"served-model-name: two models are called {twice[0]!r}; name them apart")
    return models


def check_goals(name: str, one_shot: bool, goals: SLO, drafter: str) -> None:
    """Raises ValueError for what a fleet file asks of a model and models of its kind do not do."""
    if goals.deadline is not None and not one_shot:
        raise ValueError(f"slo.deadline: {name!r} generates: it has ttft and tbt; a deadline is for encoders")
    if goals.tbt is not None and one_shot:
        raise ValueError(f"slo.tbt, tbt-goal: {name!r} is an encoder, which gives no tokens: it has ttft and deadline")
    if drafter != "none" and one_shot:
        raise ValueError(f"speculation.drafter: {name!r} is an encoder, which drafts nothing: only none is valid")


def paced(
    model: Model, maximum: int, fixed: bool, threads: int | None, options: list[str], measures: bool = False,
    share: float = 1.0, given: PlanningProfile | None = None,
) -> Model:  # fmt: skip
    """The model with its profile and the budget that follows: with a goal, or by default where there is a profile, in
    the file `given` or else in the cache.

    What a goal, a choice of drafts or a plan (`measures`) needs and neither has, or has for narrower steps only, is
    measured first, by `paceline profile` with these options. Raises ValueError for a goal below the floor: `share` of
    what one device takes (`goal_budget`).
    """
    entry = given.models.get(model.name) if given else None
    if model.encoder:
        if model.device != "cpu":
            return model
        file = profile_cache.cache_file(model.path, model.quantization, profile_cache.Device.here(threads))
        texts, error = entry and entry.texts(), given.margin(model.name) if given and entry else 0.0
        if texts and (len(texts.seconds) > 1 or not profile_cache.read(file)):  # of one length the cache knows more
            step, budget = text_steps(texts, maximum, error)
            return replace(model, step_time=step, budget=budget)
        if (measures or model.slo != NO_SLO) and not profile_cache.read(file):
            how = ["--threads", str(threads)] if threads else []
            measured_here(model.path, model.name, ["--quick", "--quantization", model.quantization, *how])
        if not profile_cache.read(file):
            return model
        times, _, error = text_times(file)
        step, budget = text_steps(times, maximum, error)
        return replace(model, step_time=step, budget=budget)
    device = profile_cache.Device.here(threads, model.device, model.dtype, model.kv_cache_dtype)
    tbt, chooses = model.slo.tbt, model.drafting.chooses
    needed = measures or tbt is not None or model.slo.ttft is not None or chooses

    def wide(path: Path, known: Profile, options: list[str]) -> bool:
        limit = options[options.index("--context") + 1] if "--context" in options else None
        return known.max_tokens >= min(maximum, int(limit or ModelConfig.load(path).max_context) - 1)

    def profile_of(path: Path, quantization: str, name: str, options: list[str], needed: bool) -> Profile | None:
        file = profile_cache.cache_file(path, quantization, device)
        known = profile_cache.load(file)
        if needed and not (known and wide(path, known, options)):
            where = ["--device", model.device, "--dtype", model.dtype, "--kv-cache-dtype", model.kv_cache_dtype]
            measured_here(path, name, ["--quick", *options, "--quantization", quantization, *where])
            known = profile_cache.load(file)
            assert known is not None
        return known

    asked = entry and entry.measured(model.name)
    profile = asked or profile_of(model.path, model.quantization, model.name, options, needed)
    model = replace(model, profile=profile)
    if chooses and model.drafting.model:
        name, begin = f"{model.name}'s draft model", options.index("--context") if "--context" in options else None
        own = options if begin is None else options[:begin] + options[begin + 2 :]  # its context may be shorter
        quantization = model.drafting.quantized(model.quantization)
        model = replace(model, draft_profile=profile_of(model.drafting.model, quantization, name, own, True))
    if model.profile is None:
        return model
    model = replace(model, step_time=model.profile.step_time)
    if tbt is None and (fixed or not (asked or wide(model.path, model.profile, options))):
        return model
    return replace(model, budget=goal_budget(model.name, model.profile, maximum, tbt, share))
