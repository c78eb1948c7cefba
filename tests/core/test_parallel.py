"""Side by side, in order, and the number of threads is put back."""

import pytest
import torch

from assay.core.parallel import each_on_one_core


@pytest.mark.parametrize("threads", [1, 2])
def test_order_threads_and_errors(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert each_on_one_core(lambda i: i * i, range(7)) == [0, 1, 4, 9, 16, 25, 36]
        with pytest.raises(ZeroDivisionError):
            each_on_one_core(lambda i: 1 / i, [1, 0, 2])
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
