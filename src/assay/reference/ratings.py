"""Made-up users and items with known structure: tastes of low rank on top of popularity."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix

KIND = "ratings"
ABOUT = "2,000 made-up users and 300 items: low-rank tastes, a long-tailed popularity, uneven activity"

_N_FACTORS = 8
_TASTE = 1.5
_TAIL = 1.0
_ACTIVITY = 0.5
_OFFSET = 0.5


def load(*, n_users: int = 2000, n_items: int = 300, seed: int = 0) -> csr_matrix:
    """Draw implicit feedback.

    User u interacts with item i with probability sigmoid(taste + popularity + activity): taste is a product of
    standard normal factors of rank 8 with standard deviation 1.5; popularity falls with the logarithm of a random
    rank; activity is normal with standard deviation 0.5.

    Args:
        n_users: rows.
        n_items: columns. Memory and time grow with users x items.
        seed: same seed, same matrix.

    Returns:
        Zeros and ones in float64, users x items.

    Example:
        >>> R = load(n_users=50, n_items=20)
        >>> R.shape, float(R.max())
        ((50, 20), 1.0)
    """
    generator = np.random.default_rng(seed)
    users = generator.standard_normal((n_users, _N_FACTORS))
    items = generator.standard_normal((n_items, _N_FACTORS))
    popularity = -_TAIL * np.log1p(generator.permutation(n_items))
    activity = _ACTIVITY * generator.standard_normal((n_users, 1))
    logits = users @ items.T * (_TASTE / np.sqrt(_N_FACTORS)) + popularity + activity + _OFFSET
    return csr_matrix((generator.random((n_users, n_items)) < 1 / (1 + np.exp(-logits))).astype(np.float64))
