"""One small mistake each, as (file under cactus_theory, what is there, what replaces it).

Every occurrence of what is there is replaced. EXPLAINED names mistakes that no test can
see, with the reason.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A mistake to make in a copy of the package."""

    file: str
    old: str
    new: str


MUTATIONS = tuple(
    Mutation(*parts)
    for parts in (
        # divergences
        ("divergences/classical.py", ".log_().mul_(t)\n", ".log_().mul_(-t)\n"),
        ("divergences/classical.py", ".sub_(t).add_(1)", ".sub_(t)"),
        ("divergences/_base.py", "outside * price", "0 * outside"),
        ("divergences/classical.py", "return (t - 1).abs() / 2", "return (t - 1).abs()"),
        ("divergences/classical.py", "return 1 - t**-2\n", "return 1 - t**-1\n"),
        (
            "divergences/orders.py",
            "torch.expm1((self.a - 1) * delta) / (self.a",
            "torch.expm1(self.a * delta) / (self.a",
        ),
        (
            "divergences/max_divergence.py",
            "return ratio.amax(-1).log()",
            "return ratio.amin(-1).log()",
        ),
        # the optimum
        ("optimum/path.py", "self.largest = (q - p)", "self.largest = (p - 2 * q)"),
        (
            "optimum/path.py",
            "capped = (rejection - self.zero_mass).clamp(min=0.0)",
            "capped = rejection",
        ),
        (
            "optimum/path.py",
            "edge = (rejection + _pick(self.p_below, index))",
            "edge = (rejection - _pick(self.p_below, index))",
        ),
        (
            "optimum/path.py",
            "return index, self._between_neighbours(edge, index).clamp(max=1.0)",
            "return index, self._between_neighbours(edge, index).clamp(max=0.9)",
        ),
        ("optimum/roots.py", "kept = there <= budget", "kept = there > budget"),
        (
            "optimum/geometry.py",
            "price_from_generator(1 / self.slope(lower, upper), spent)",
            "price_from_generator(2 / self.slope(lower, upper), spent)",
        ),
        (
            "optimum/geometry.py",
            "level = -price * f.centred_slope",
            "level = price * f.centred_slope",
        ),
        (
            "optimum/solve.py",
            "lossless = rejection >= path.largest",
            "lossless = rejection > path.largest + 1",
        ),
        (
            "optimum/newton.py",
            "f, width = tables.generator, 1 / price",
            "f, width = tables.generator, price",
        ),
        (
            "optimum/newton.py",
            "down, up = f.centred_slope(edges)",
            "up, down = f.centred_slope(edges)",
        ),
        ("optimum/newton.py", "(moved.sum(-1) - tables.leaked).abs()", "moved.sum(-1).abs()"),
        ("optimum/solve.py", "left = (~found.done)", "left = (found.done)"),
        # policies
        (
            "policies/_base.py",
            "return (raised / drafted).nan_to_num_(nan=0.0).clamp_(max=1.0)",
            "return (raised / drafted).nan_to_num_(nan=0.0)",
        ),
        (
            "policies/_base.py",
            "torch.where(total > 0, residual / torch.where(total > 0, total, 1.0), fallback)",
            "torch.where(total > 0, residual, fallback)",
        ),
        ("policies/_base.py", "rejected = p * (1 - phi)", "rejected = p * phi"),
        (
            "policies/_base.py",
            "return kept + lost * self.recovery_row(q, p)",
            "return kept + self.recovery_row(q, p)",
        ),
        (
            "policies/_base.py",
            "return normalised_or((self.target(q, p) - p).clamp(min=0.0), q)",
            "return normalised_or((q - p).clamp(min=0.0), q)",
        ),
        (
            "policies/_base.py",
            "return residual_or(self.target(own_q, own_p) - own_p, own_q)",
            "return residual_or(own_p - self.target(own_q, own_p), own_q)",
        ),
        (
            "policies/_base.py",
            "return keep_probability(target.gather(-1, n), p.double().gather(-1, n))",
            "return keep_probability(p.double().gather(-1, n), target.gather(-1, n))",
        ),
        (
            "decoding/models/weights.py",
            "return lambda x: (x * gain).div_(length(x))",
            "return lambda x: x / length(x)",
        ),
        ("decoding/models/linear.py", "weight).all()", "weight).any()"),
        (
            "policies/_per_proposal.py",
            "return (1 - gamma) / (1 - q_n).clamp_(",
            "return (1 + gamma) / (1 - q_n).clamp_(",
        ),
        (
            "policies/_per_proposal.py",
            "return rows.scatter(-1, n[..., None], gamma[..., None])",
            "return rows",
        ),
        (
            "policies/_per_proposal.py",
            "law = torch.minimum(p, gamma)",
            "law = torch.minimum(p, q)",
        ),
        (
            "policies/_per_proposal.py",
            "totals[:, 1:].flip(-1).cumsum(-1).flip(-1)",
            "totals[:, :-1].flip(-1).cumsum(-1).flip(-1)",
        ),
        (
            "policies/_per_proposal.py",
            "return residual_or(scaled.sub_(p[at]), own_q)",
            "return residual_or(scaled, own_q)",
        ),
        (
            "policies/_per_proposal.py",
            "weight = lost / torch.maximum(raised.sum(-1), lost)",
            "weight = lost",
        ),
        ("policies/cactus.py", "mul_(2 * self.delta)", "mul_(self.delta)"),
        ("policies/cactus.py", "(1 - q_n) * q_n", "(1 + q_n) * q_n"),
        (
            "divergences/_base.py",
            "q_n * self.centred(up) + rest",
            "q_n * self.centred(up) - rest",
        ),
        ("policies/band.py", "torch.maximum(p, lower * q)", "torch.minimum(p, lower * q)"),
        (
            "policies/band.py",
            "budget = Budget(self.divergence, self.delta, ",
            "budget = Budget(self.divergence, self.delta / 2, ",
        ),
        (
            "policies/typical.py",
            "self.threshold(q) * (1 + TIE)",
            "self.threshold(q) * (1 - TIE)",
        ),
        ("policies/typical.py", "(-entropy).exp()", "entropy.exp()"),
        (
            "policies/speculative.py",
            "keep_probability(q_n, p.gather(-1, n).double())",
            "keep_probability(p.gather(-1, n).double(), q_n)",
        ),
        # the verification step
        ("verify/_step.py", "kept = accept < phi", "kept = accept <= phi"),
        (
            "verify/_step.py",
            "refused = self.accept[at] >= phi",
            "refused = self.accept[at] > phi",
        ),
        (
            "verify/_step.py",
            "refused = [row for row, count in enumerate(counts) if count < drafted[row]]",
            "refused = [row for row, count in enumerate(counts) if count <= drafted[row]]",
        ),
        (
            "verify/_step.py",
            "kept &= _steps(ids) < lengths[:, None]",
            "kept &= _steps(ids) <= lengths[:, None]",
        ),
        (
            "verify/_draw.py",
            "index = torch.searchsorted(cumulative, threshold, right=True)",
            "index = torch.searchsorted(cumulative, threshold)",
        ),
        (
            "verify/_draw.py",
            "length + 1, generator=source",
            "length + 2, generator=source",
        ),
        # the decode loop
        (
            "decoding/_round.py",
            "self.target.rollback(row, length - 1)",
            "self.target.rollback(row, length)",
        ),
        (
            "decoding/models/places.py",
            "slots = torch.where(real, slots, cache.capacity)",
            "slots = chain",
        ),
        (
            "decoding/_round.py",
            "keep = [count + 1 for count in drafted]",
            "keep = [max(count, 1) for count in drafted]",
        ),
        # the emitted law
        (
            "emitted.py",
            "torch.where(drafted, costs, 0.0).amax(-1), over",
            "torch.where(drafted, costs, 0.0).amin(-1), over",
        ),
        ("emitted.py", "accepted = (p * rule.keep(q, p)).sum(-1)", "accepted = p.sum(-1)"),
    )
)

# what replaces the code → why nothing can see it
EXPLAINED = {
    "level = price * f.centred_slope": (
        "the multiplier of Σh = 1 enters as μ(1 − Σ q u), which is 0 on every band"
    ),
}
