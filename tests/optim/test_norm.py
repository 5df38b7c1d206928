"""The norm of gradients that lie on several tiers."""

import torch

from unwall.optim.norm import total_squares


class OnCard(torch.Tensor):
    """A sum of squares that is said to be an accelerator's."""

    is_cuda = True


def test_sums_of_the_host_keep_their_bits_beside_those_of_the_device():
    host = torch.full((4096,), 3e19)  # its squares have no sum in fp32
    card = torch.tensor(0.5, dtype=torch.float64).as_subclass(OnCard)
    alone = total_squares([host], torch.device("cpu"))
    both = total_squares([host, card], torch.device("cpu"))
    assert both.tolist() == [alone[0].item() + 0.5, 0.0]
