"""Who drafts for a model of the fleet, and at which cost."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from paceline.cli.fleet_file import Speculation
from paceline.cli.sources import resolve
from paceline.core.request import DRAFTERS
from paceline.engine.config import ModelConfig
from paceline.latency.profile import Profile
from paceline.speculation.lookahead import Costs, Lookahead


@dataclass(frozen=True, slots=True)
class Drafting:
    """A fleet file's `speculation`, its source resolved."""

    drafter: str = "ngram"  # or early_exit, or a model's directory
    early_exit_layers: int | None = None
    max_draft_tokens: int = 0  # 0: nobody drafts
    adaptive: bool = True  # as many as pay, instead of always the most

    @staticmethod
    def of(speculation: Speculation) -> "Drafting":
        """Raises ValueError naming the drafter."""
        drafter, layers, most = speculation.drafter, speculation.early_exit_layers, speculation.max_draft_tokens
        if layers is not None and drafter != "early_exit":
            raise ValueError("speculation.early_exit_layers: is only allowed with drafter: early_exit")
        if drafter == "none":
            return Drafting()
        if drafter not in DRAFTERS:
            try:
                drafter = str(resolve(drafter))
            except ValueError as error:
                text = str(error).removeprefix("source: ")
                raise ValueError(f"speculation.drafter: {text}; or none, {', '.join(DRAFTERS)}") from None
        return Drafting(drafter, layers, most, speculation.adaptive)

    @property
    def model(self) -> Path | None:
        """That drafts, where it is one of its own."""
        return None if self.drafter in DRAFTERS else Path(self.drafter)

    @property
    def chooses(self) -> bool:
        """Whether profiles are needed, to choose how many tokens to draft."""
        return self.adaptive and self.max_draft_tokens > 0


def lookahead(
    drafting: Drafting, path: Path, quantization: str, target: Profile, draft: Profile | None
) -> Callable[[], Lookahead]:
    """Makes what chooses how many tokens to draft for the model in `path`, by its profile and the draft model's."""
    cost = draft and _costs(draft)
    if drafting.drafter == "early_exit":
        config = ModelConfig.load(path)
        layers = config.exit_layers(drafting.early_exit_layers)
        part = replace(config, layers=layers, windows=config.windows[:layers])
        cost = _costs(target).scaled(part.weight_bytes(quantization) / config.weight_bytes(quantization))
    return partial(Lookahead, _costs(target), cost)


def _costs(profile: Profile) -> Costs:
    time = profile.step_time
    return Costs(time.linear, time.emit + time.decode, time.decode_context)
