"""How probable counts are under a law."""

import torch
from torch import Tensor

LEAST = 5.0  # cells with fewer expected counts are counted together: the usual rule of thumb


def p_value(counts: Tensor, law: Tensor) -> float:
    """Return the p-value of a χ² of counts (N,); 0 if something impossible was counted."""
    expected = law * counts.sum()
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    often = expected >= LEAST
    seen, expected = (
        torch.cat([part[often], part[~often].sum()[None]]).double() for part in (counts, expected)
    )
    counted = expected > 0
    statistic = ((seen - expected)[counted] ** 2 / expected[counted]).sum()
    freedom = torch.tensor(max(int(counted.sum()) - 1, 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
