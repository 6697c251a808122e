"""Two tokenizers, one set of tokens: what lets a model draft for another that spells text differently.

A draft may be anything, so it suffices that drafted tokens are tokens of the target, and that their probabilities are
known in the target's vocabulary. Tokens that both have (the same bytes; the ends of sequence count as the same) keep
theirs, renormalised when they are sampled from; others cannot be drafted. The context that the draft model sees is the
target's, token by token: one that it does not have is replaced by the first of those that it would spell it with, so
that both count the same positions and share their blocks. Timor et al. (2025) draft through the intersection, too, but
spell the context anew.
"""

from pathlib import Path

import torch
from torch import Tensor

from paceline.engine.config import ModelError
from paceline.engine.tokenizer import Tokenizer


class SharedVocabulary:
    """Token ids of a target and of the model that drafts for it."""

    def __init__(self, target: Tokenizer, draft: Tokenizer, sizes: tuple[int, int]) -> None:
        """`sizes`: of the target's logits and of the draft's, which may be padded. Raises ValueError if no token is
        shared."""
        theirs = {draft.token_bytes(token): token for token in reversed(range(min(sizes[1], draft.vocab_size)))}
        shared, ends = {}, [token for token in draft.eos_ids if token < sizes[1]]
        stand_in = torch.zeros(sizes[0], dtype=torch.int64)
        for token in range(min(sizes[0], target.vocab_size)):
            spelt = target.token_bytes(token)
            same = theirs.get(spelt) if spelt else None
            if token in target.eos_ids and ends and same not in ends:
                same = ends[0]
            if same is not None:
                shared[token] = same
            else:
                others = draft.encode(spelt.decode("utf-8", "replace"), add_special_tokens=False)
                stand_in[token] = others[0] if others and others[0] < sizes[1] else 0
        if not shared.keys() - set(target.eos_ids):
            raise ValueError("their vocabularies have no token in common")
        self.size, self.num_shared = sizes[0], len(shared)
        self._target, self._draft = torch.tensor(list(shared.items())).unbind(1)
        self.to_draft = stand_in.index_copy(0, self._target, self._draft)  # [target's vocabulary]

    def to(self, device: torch.device) -> "SharedVocabulary":
        self.to_draft, self._target, self._draft = (x.to(device) for x in (self.to_draft, self._target, self._draft))
        return self

    def to_target(self, logits: Tensor) -> Tensor:
        """The draft's logits [rows, its vocabulary] in the target's vocabulary; -inf where it has no such token."""
        out = logits.new_full((len(logits), self.size), -torch.inf)
        return out.index_copy_(1, self._target, logits[:, self._draft])


def shared_vocabulary(target: Path, draft: Path, sizes: tuple[int, int]) -> SharedVocabulary | None:
    """None where the checkpoints have the same vocabulary. Raises ModelError where drafting is impossible."""
    files = [path / "tokenizer.json" for path in (target, draft)]
    there = [file.is_file() for file in files]
    same = not any(there) or all(there) and files[0].read_bytes() == files[1].read_bytes()
    if same and sizes[0] == sizes[1]:
        return None
    if not all(there):
        raise ModelError(f"drafter: {draft} and {target} differ in their vocabularies, and one has no tokenizer.json")
    try:
        return SharedVocabulary(Tokenizer.load(target), Tokenizer.load(draft), sizes)
    except ValueError as error:
        raise ModelError(f"drafter: {draft} cannot draft for {target}: {error}") from error
