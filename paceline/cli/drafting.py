"""Who drafts for a model of the fleet, and at which cost."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.cli.fleet_file import Speculation
from paceline.cli.sources import resolve
from paceline.core.drafter_name import FORMS, DrafterName
from paceline.engine.config import ModelConfig
from paceline.latency.profile import Profile
from paceline.latency.step_time import StepTime
from paceline.speculation.costs import Costs
from paceline.speculation.lookahead import Lookahead

# about, in seconds; what they really take is learnt
TRIGRAMS, NGRAMS = Costs([0.0], token=1e-4), Costs([0.0, 0.0], once=3e-5)
ASKING = 5e-5  # that choosing how much is drafted takes, and learning what became of it


@dataclass(frozen=True, slots=True)
class Drafting:
    """A fleet file's `speculation`, its source resolved."""

    drafter: DrafterName = DrafterName("ngram")
    early_exit_layers: int | None = None
    max_draft_tokens: int = 0  # 0: nobody drafts
    adaptive: bool = True  # as many as pay, instead of always the most
    quantization: str | None = None  # of a draft model
    smooth: bool = False  # streams get what a step yields evenly

    @staticmethod
    def of(speculation: Speculation, device: str = "cpu") -> "Drafting":
        """Draft models are in int8 by default, on a GPU as their target. Raises ValueError naming the drafter."""
        layers, most = speculation.early_exit_layers, speculation.max_draft_tokens
        drafter = DrafterName("ngram") if speculation.drafter == "none" else _resolved(speculation.drafter)
        if layers is not None and drafter.kind != "early_exit":
            raise ValueError("speculation.early_exit_layers: is only allowed with drafter: early_exit")
        if speculation.quantization is not None and drafter.kind != "model":
            raise ValueError("speculation.quantization: is only allowed with a draft model")
        if speculation.drafter == "none":
            return Drafting()
        default = "int8" if drafter.kind == "model" and device == "cpu" else None
        quantization = speculation.quantization or default
        return Drafting(drafter, layers, most, speculation.adaptive, quantization, speculation.smooth)

    def quantized(self, target: str) -> str:
        """How what drafts for a target that is quantized so is quantized itself: early exit as its target."""
        return self.quantization or target

    @property
    def model(self) -> Path | None:
        """That drafts, where it is one of its own."""
        return Path(self.drafter.path) if self.drafter.kind == "model" else None

    @property
    def chooses(self) -> bool:
        """Whether profiles are needed, to choose how many tokens to draft."""
        return self.adaptive and self.max_draft_tokens > 0


def _resolved(text: str) -> DrafterName:
    """With paths of what is there. Raises ValueError naming the drafter and the valid ones."""
    try:
        name = DrafterName.parse(text)
        if name.kind == "model":
            return name._replace(path=str(resolve(name.path)))
        if name.kind == "trigram" and not Path(name.path).is_file():
            raise ValueError(f"{name.path} is not a text file")
        return name._replace(path=name.path and str(Path(name.path).absolute()))
    except ValueError as error:
        raise ValueError(f"speculation.drafter: {str(error).removeprefix('source: ')}; or none, {FORMS}") from None


def lookahead(
    drafting: Drafting, path: Path, quantization: str, target: Profile, draft: Profile | None
) -> Callable[[], Lookahead]:
    """Makes what chooses how many tokens to draft for the model in `path`, by its profile and the draft model's."""
    drafts = costs(drafting, path, quantization, target.step_time, draft)
    return partial(Lookahead, Costs.of(target.step_time), drafts, ASKING)


def costs(
    drafting: Drafting, path: Path, quantization: str, target: StepTime, draft: Profile | None
) -> Costs | None:
    """Of drafting for the model in `path`; None: nobody knows, and it is taken for nothing."""
    if drafting.drafter.kind == "trigram":
        return TRIGRAMS
    if drafting.drafter.kind == "ngram":
        return NGRAMS
    if drafting.drafter.kind == "early_exit":
        config = ModelConfig.load(path)
        part = config.first(config.exit_layers(drafting.early_exit_layers))
        return Costs.of(target).scaled(part.weight_bytes(quantization) / config.weight_bytes(quantization))
    return draft and Costs.of_drafts(draft.step_time, draft.chained)
