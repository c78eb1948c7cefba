"""Time and memory of DEQL's two sides against the textbook recipe, in one process each.

    python benchmarks/deql.py                     users x items as in MovieLens ml-latest-small, made up
    python benchmarks/deql.py --on ratings.csv    your own interactions
    python benchmarks/deql.py --skip paper        leave out a contestant

The textbook recipe is the paper's: a dense inverse of H_0, the products S_1 and S_2, and the rank-one updates of all
columns at once.
"""

import argparse
import multiprocessing
import resource
import time

import numpy as np
from scipy.sparse import csr_matrix

from assay.core.ratings import read_ratings
from assay.models import DEQL
from assay.reference.ratings import load

SETTING = {"a": 1.0, "b": 0.5, "p": 0.5, "l2": 100.0}


def paper(R, rows):
    a, b, p, l2 = SETTING.values()
    q, e = 1 - p, p * a**2 + (1 - p) * b**2
    C = np.asarray((R.T @ R).todense())
    c = np.diag(C).copy()
    H = q * q * e * C
    np.fill_diagonal(H, q * e * c + l2)
    E = q * q * p * (b * b - a * a) * C
    np.fill_diagonal(E, q * p * (b * b - a * a) * c)
    V = q * e * C
    np.fill_diagonal(V, q * b * b * c)
    P = np.linalg.inv(H)
    S1, S2 = P @ V, P @ E
    np.fill_diagonal(E, 0)
    scale = 1 + np.diag(S2)
    s = S1 - S2 * (np.diag(S1) / scale)
    t = P - S2 * (np.diag(P) / scale)
    W = s - t * (np.einsum("ji,ji->i", E, s) / (1 + np.einsum("ji,ji->i", E, t)))
    return rows @ W


def items(R, rows):
    return DEQL(**SETTING, solver="items").fit(R).score_items(rows)


def users(R, rows):
    return DEQL(**SETTING, solver="users").fit(R).score_items(rows)


CONTESTANTS = {"paper": paper, "items": items, "users": users}


def measure(name, R, results):
    rows = R[:100]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    scores = CONTESTANTS[name](R, rows)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    results.put((seconds, peak / 1e6, scores[:, :50]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", help="a CSV or NPZ of interactions")
    parser.add_argument("--skip", action="append", default=[], choices=CONTESTANTS)
    options = parser.parse_args()
    R = read_ratings(options.on) if options.on else load(n_users=610, n_items=9724)
    R = csr_matrix((np.ones(R.nnz), R.indices, R.indptr), shape=R.shape)
    print(f"{R.shape[0]} users, {R.shape[1]} items, {R.nnz} interactions; fit and scores of 100 users")
    context = multiprocessing.get_context("spawn")
    found = {}
    for name in CONTESTANTS:
        if name in options.skip:
            continue
        results = context.Queue()
        process = context.Process(target=measure, args=(name, R, results))
        process.start()
        found[name] = results.get()
        process.join()
        print(f"{name:6} {found[name][0]:8.2f} s   {found[name][1]:6.2f} GB above the input", flush=True)
    fastest = found.get("users", next(iter(found.values())))
    for name, (seconds, _, scores) in found.items():
        apart = np.abs(scores - fastest[2]).max()
        print(f"{name:6} {seconds / fastest[0]:8.1f} x the time of users; largest difference in score {apart:.1e}")


if __name__ == "__main__":
    main()
