"""Prompt lookup: what followed the last tokens when they came before is likely to follow again.

Free of any model, and good where outputs repeat their prompts: edits, quotations, summaries, loops. The drafted tokens
are sure ones (their probability is 1), so that acceptance draws the target's token as ever and compares.
"""

import numpy as np

LONGEST, SHORTEST = 4, 2  # tokens that have to agree


def propose(tokens: np.ndarray, count: int, longest: int = LONGEST, shortest: int = SHORTEST) -> list[int]:
    """`count` tokens to follow `tokens` [n] (integers), or none: those behind the place that agrees most with the end.

    Of several such places the last one. At least `shortest` tokens must agree, more than `longest` make no difference.
    What was repeated up to the end is taken to go on.
    """
    if len(tokens) < 2 or count < 1:
        return []
    ends, agreed = np.flatnonzero(tokens[:-1] == tokens[-1]), 1
    while len(ends) and agreed < longest:
        further = ends[ends >= agreed]
        further = further[tokens[further - agreed] == tokens[-1 - agreed]]
        if not len(further):
            break
        ends, agreed = further, agreed + 1
    if not len(ends) or agreed < shortest:
        return []
    follows = tokens[ends[-1] + 1 :]
    return np.resize(follows, count).tolist() if len(follows) < count else follows[:count].tolist()
