"""A bigram model, which predicts a token from the one before it alone: a baseline for trained models."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

DISCOUNT = 0.75  # taken from every count, for pairs that were never seen


def bigram_loss(training: npt.ArrayLike, held_out: Iterable[npt.ArrayLike], *, vocab_size: int) -> float:
    """Mean loss (nats) of every held-out token after its document's first, by an interpolated Kneser-Ney bigram.

    p(w | h) = (max(c(h, w) - d, 0) + d · n(h) · q(w)) / c(h), where n(h) is the number of distinct tokens after h and
    q(w) the number of distinct tokens before w, plus one half (Chen and Goodman 1999, section 2.7).

    training: (N,) token ids that pairs are counted in; held_out: ids of each document. NaN where nothing is predicted.
    """
    read = np.asarray(training, dtype=np.int64)
    pairs, counts = np.unique(read[:-1] * vocab_size + read[1:], return_counts=True)
    before, after = np.divmod(pairs, vocab_size)
    seen = np.bincount(before, weights=counts, minlength=vocab_size)  # c(h)
    kinds = np.bincount(before, minlength=vocab_size)  # n(h)
    places = np.bincount(after, minlength=vocab_size) + 0.5
    anywhere = places / places.sum()  # q(w)
    pairs, counts = np.append(pairs, vocab_size**2), np.append(counts, 0)  # what is not found is found here
    nats, predicted = 0.0, 0
    for ids in held_out:
        document = np.asarray(ids, dtype=np.int64)
        h, w = document[:-1], document[1:]
        place = np.searchsorted(pairs, h * vocab_size + w)
        count = np.where(pairs[place] == h * vocab_size + w, counts[place], 0)
        given = (np.maximum(count - DISCOUNT, 0) + DISCOUNT * kinds[h] * anywhere[w]) / np.maximum(seen[h], 1)
        nats -= float(np.log(np.where(seen[h] > 0, given, anywhere[w])).sum())
        predicted += len(w)
    return nats / predicted if predicted else float("nan")
