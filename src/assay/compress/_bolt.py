"""BOLT: option-level distillation for multiple choice, and a router that spends extra work where it is worth it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import brentq
from scipy.special import entr, expit, softmax
from torch import Tensor, nn

from assay.core.errors import InputError, NotApplicable
from assay.core.results import Column, Result, Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = [
    "BudgetRouter",
    "Decision",
    "DecisionStep",
    "Neighbours",
    "OddLoss",
    "OptionLog",
    "OptionMetrics",
    "OptionScorer",
    "OptionScores",
    "RoutingResult",
    "odd_loss",
    "option_agreement",
    "option_metrics",
    "option_probs",
    "option_temperature",
    "risk_coverage",
    "routing_features",
    "same_type_neighbours",
]

Array = np.ndarray
FEATURES = ("largest probability", "margin", "entropy", "affinity")
_COSTS = {"HR": 0.50, "tmRAG": 0.30, "QD": 0.35}
# Costs are sums of decimal fractions: 1.3 - 1.0 must pay for 0.3.
_SLACK = 1e-9
# Temperatures are sought in this range; a validation set without an error would send them to zero.
_COLDEST, _HOTTEST = 1e-2, 1e2
# Similarities held at a time while neighbours are sought.
_SIMILARITIES = 2**24


# ---- distillation ------------------------------------------------------------------------------------------------


class OddLoss(NamedTuple):
    """Option-level decision distillation, in nats, averaged over the questions.

    Attributes:
        loss: λ_KL · KL + λ_CE · CE; the one to differentiate.
        kl: KL(teacher ‖ student) over the options.
        ce: cross-entropy of the right option; 0 where no target was given.
    """

    loss: Float[Tensor, ""]
    kl: Float[Tensor, ""]
    ce: Float[Tensor, ""]


def option_probs(
    scores: Float[Tensor, "*batch options"],
    temperature: float = 1.0,
    mask: Bool[Tensor, "*batch options"] | None = None,
) -> Float[Tensor, "*batch options"]:
    """The distribution over the options, softmax(scores / temperature); the teacher's wants a temperature of 2.

    Args:
        scores: one a option, in nats; a constant added to all of a question changes nothing.
        temperature: above 0; larger is flatter.
        mask: True where there is an option, for questions of different sizes. None: every one is there.

    Returns:
        Probabilities in float32, or float64 for such scores; 0 where there is no option.

    Raises:
        InputError: the temperature is not positive, or the mask does not fit or leaves a question without option.

    Source:
        "BOLT: Decision-Aligned Distillation and Budget-Aware Routing for Constrained Multimodal QA on Robots",
        openreview:Vsy3nAnaX6, option-level decision distillation (p_T, τ_kd = 2).

    Example:
        >>> import torch
        >>> from assay.compress import option_probs
        >>> [round(p, 6) for p in option_probs(torch.tensor([2.0, 0.0]), temperature=2.0).tolist()]
        [0.731059, 0.268941]
    """
    _check_positive("temperature", temperature)
    return (_masked(scores, mask, "scores") / temperature).softmax(-1)


def odd_loss(
    student_scores: Float[Tensor, "batch options"],
    teacher_probs: Float[Tensor, "batch options"],
    target: Int[Tensor, "batch"] | None = None,
    mask: Bool[Tensor, "batch options"] | None = None,
    *,
    lam_kl: float = 1.0,
    lam_ce: float = 0.1,
) -> OddLoss:
    """Teaches a student the teacher's preference over the options instead of its tokens.

    L = λ_KL · KL(p_T ‖ p_S) + λ_CE · CE(y, p_S) with p_S = softmax(student_scores), no temperature. The gradient of
    the first term with respect to the scores is p_S − p_T.

    Args:
        student_scores: one a option, in nats, with gradient.
        teacher_probs: the teacher's distribution, as `option_probs(teacher_scores, temperature=2.0)`; taken as given,
            without gradient.
        target: index of the right option; None leaves the second term out.
        mask: True where there is an option; None: every one is there.
        lam_kl: λ_KL, at least 0.
        lam_ce: λ_CE, at least 0.

    Returns:
        The loss and its two terms, computed in float32 or better.

    Raises:
        InputError: shapes disagree, a weight is negative, the teacher's rows do not sum to 1 or put weight on an
            absent option, or a target is no option.

    Source:
        "BOLT: Decision-Aligned Distillation and Budget-Aware Routing for Constrained Multimodal QA on Robots",
        openreview:Vsy3nAnaX6, option-level decision distillation.

    Example:
        >>> import torch
        >>> from assay.compress import odd_loss, option_probs
        >>> teacher = option_probs(torch.tensor([[2.0, 0.0]]), temperature=2.0)
        >>> loss, kl, ce = odd_loss(torch.zeros(1, 2), teacher, torch.tensor([0]))
        >>> round(float(kl), 6), round(float(ce), 6), round(float(loss), 6)
        (0.110944, 0.693147, 0.180259)
    """
    if lam_kl < 0 or lam_ce < 0:
        raise InputError(f"lam_kl is {lam_kl} and lam_ce is {lam_ce}: weights of a loss are 0 or more")
    if student_scores.ndim != 2 or teacher_probs.shape != student_scores.shape:
        raise InputError(
            f"student_scores have shape {tuple(student_scores.shape)} and teacher_probs "
            f"{tuple(teacher_probs.shape)}: both are [batch, options]"
        )
    if target is not None and target.shape != student_scores.shape[:1]:
        raise InputError(f"target has shape {tuple(target.shape)}: one index a question, {len(student_scores)} in all")
    masked = _masked(student_scores, mask, "student_scores")
    teacher = teacher_probs.detach().to(masked.dtype)
    # Under a compiler these looks at values would break the graph.
    if not torch.compiler.is_compiling():
        _check_teacher(teacher, mask)
        if target is not None:
            _check_target(target, mask, student_scores.shape[1])
    log_p = masked.log_softmax(-1)
    # An absent option has log-probability -inf and weight 0: their product would be NaN.
    present = log_p if mask is None else log_p.masked_fill(~mask, 0.0)
    kl = (torch.special.xlogy(teacher, teacher) - teacher * present).sum(-1).mean()
    ce = kl.new_zeros(()) if target is None else -log_p.gather(-1, target[:, None].long()).mean()
    return OddLoss(lam_kl * kl + lam_ce * ce, kl, ce)


def _masked(scores: Tensor, mask: Tensor | None, name: str) -> Tensor:
    if not isinstance(scores, Tensor) or not scores.dtype.is_floating_point or scores.ndim < 1:
        kind = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(f"{name} are {kind}: pass a tensor of floating-point scores, options last")
    if scores.shape[-1] < 2:
        raise InputError(f"{name} have {scores.shape[-1]} options: a choice needs at least 2")
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is None:
        return wide
    if mask.dtype != torch.bool or mask.shape != scores.shape:
        raise InputError(f"mask is {mask.dtype} of shape {tuple(mask.shape)}: booleans, one for each of {name}")
    if not torch.compiler.is_compiling() and not mask.any(-1).all():
        raise InputError("mask leaves a question without any option")
    return wide.masked_fill(~mask, -torch.inf)


def _check_teacher(teacher: Tensor, mask: Tensor | None) -> None:
    # Probabilities that were stored in bfloat16 sum to 1 within a hundredth.
    sums = teacher.sum(-1)
    if not bool(((sums - 1).abs() < 2e-2).all() and (teacher >= 0).all()):
        raise InputError("teacher_probs are no distributions: each row sums to 1; option_probs makes them of scores")
    if mask is not None and bool((teacher.masked_fill(mask, 0.0) > 0).any()):
        raise InputError("teacher_probs put weight on an option that the mask leaves out")


def _check_target(target: Tensor, mask: Tensor | None, n_options: int) -> None:
    if target.dtype.is_floating_point or target.dtype == torch.bool:
        raise InputError(f"target is {target.dtype}: pass the index of the right option")
    if bool(((target < 0) | (target >= n_options)).any()):
        raise InputError(
            f"target goes from {int(target.min())} to {int(target.max())}: options are 0 to {n_options - 1}"
        )
    if mask is not None and not bool(mask.gather(-1, target[:, None].long()).all()):
        raise InputError("target is an option that the mask leaves out: the answer is not among the options")


def _check_positive(name: str, value: float) -> None:
    if not value > 0 or not np.isfinite(value):
        raise InputError(f"{name} is {value}: give a positive number")


# ---- scoring options with a language model -----------------------------------------------------------------------


@dataclass(frozen=True)
class OptionScores:
    """What a language model thinks of the options of one question.

    Attributes:
        scores: log-probability of each option's tokens after the prompt, in nats.
        probs: softmax of the scores.
        n_tokens: how many tokens of each option were scored.
    """

    scores: Float[Tensor, "options"]
    probs: Float[Tensor, "options"]
    n_tokens: Int[Tensor, "options"]

    @property
    def best(self) -> int:
        """Index of the option with the largest score."""
        return int(self.scores.argmax())


class OptionScorer:
    """Scores the options of a question by their likelihood under a causal language model: no text is generated.

    s(k) = Σ log p(token | prompt, earlier tokens of option k), over the tokens of the option alone. All options are
    encoded with the prompt and scored in batches, padded on the right. Where a tokenizer merges the prompt's last
    characters with an option's first, scoring starts at the first token in which any of them differ, the same for
    all options, so that the scores stay comparable.

    Args:
        model: a causal language model of transformers, or one with images; its mode and device are left as they are.
        processor: the model's tokenizer, or its processor where images are asked about.
        chat: put the prompt as a user's turn and the option as the assistant's, through the chat template. Otherwise
            the option follows the prompt as it is: begin it with a space where one belongs.
        normalize: divide a score by the option's number of tokens; a sum favours short options.
        batch_size: options in one pass.

    Source:
        "BOLT: Decision-Aligned Distillation and Budget-Aware Routing for Constrained Multimodal QA on Robots",
        openreview:Vsy3nAnaX6, constrained decoding by answer-segment likelihood.

    Example:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from assay.compress import OptionScorer
        >>> from assay.reference.tiny_lm import load
        >>> model = AutoModelForCausalLM.from_pretrained(load()).eval()
        >>> scorer = OptionScorer(model, AutoTokenizer.from_pretrained(load()))
        >>> scorer("She was not at all", [" surprised", " function"]).best
        0
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        *,
        chat: bool = False,
        normalize: bool = False,
        batch_size: int = 32,
    ) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise InputError(f"batch_size is {batch_size!r}: give a whole number of at least 1")
        if chat and not getattr(processor, "chat_template", None):
            raise NotApplicable("the tokenizer has no chat template: leave out chat=True and write the prompt yourself")
        self.model = model
        self.processor = processor
        self.chat = chat
        self.normalize = normalize
        self.batch_size = batch_size
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def __call__(self, prompt: str, options: Sequence[str], image: Any = None) -> OptionScores:
        """Scores of the options, without gradient.

        Args:
            prompt: what comes before the answer.
            options: at least two different strings.
            image: what the processor takes as an image; the same for all options.

        Raises:
            InputError: fewer than two options or two the same, an empty prompt or option, an image for a tokenizer,
                or scores that are not finite.
        """
        scores, n_tokens = self._score(prompt, options, image)
        if not torch.isfinite(scores).all():
            raise InputError("the model gives scores that are not finite: check its weights and its dtype")
        return OptionScores(scores, scores.softmax(-1), n_tokens)

    def score(self, prompt: str, options: Sequence[str], image: Any = None) -> Float[Tensor, "options"]:
        """The same scores with gradient, as `odd_loss` takes them: stack or pad those of several questions."""
        return self._score(prompt, options, image)[0]

    def _score(self, prompt: str, options: Sequence[str], image: Any) -> tuple[Tensor, Tensor]:
        _check_options(options)
        texts = self._texts(prompt, options, image)
        rows = self._encode(texts, image)
        ids, attended = rows["input_ids"], rows["attention_mask"].bool()
        real = attended.sum(1)
        # The prompt's own encoding stands first; how far does each option's agree with it?
        together = (ids[1:] == ids[:1]) & attended[1:] & attended[:1]
        start = int(together.long().cumprod(1).sum(1).min())
        if start < 1:
            raise InputError("prompt is empty: the first token of an option needs something before it")
        n_tokens = real[1:] - start
        if bool((n_tokens < 1).any()):
            empty = options[int((n_tokens < 1).nonzero()[0])]
            raise InputError(f"option {empty!r} adds no token to the prompt: leave it out")
        scores = []
        for first in range(1, len(texts), self.batch_size):
            part = slice(first, first + self.batch_size)
            width = int(real[part].max())
            scores.append(self._pass({k: _rows(v, part, len(texts), width) for k, v in rows.items()}, start))
        score = torch.cat(scores)
        return (score / n_tokens if self.normalize else score), n_tokens

    def _pass(self, inputs: dict[str, Any], start: int) -> Tensor:
        ids, attended = inputs["input_ids"], inputs["attention_mask"].bool()
        kept = ids.shape[1] - start + 1
        # Logits of the prompt are not wanted; a vocabulary's worth for each of its tokens would fill memory.
        out = self.model(**inputs, **({"logits_to_keep": kept} if self._keeps else {})).logits[:, -kept:-1]
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        chosen = out.gather(-1, ids[:, start:, None])[..., 0] - out.logsumexp(-1)
        return (chosen * attended[:, start:]).sum(1)

    def _texts(self, prompt: str, options: Sequence[str], image: Any) -> list[str]:
        if not self.chat:
            return [prompt, *(prompt + option for option in options)]
        content: Any = prompt if image is None else [{"type": "image"}, {"type": "text", "text": prompt}]
        turns = [{"role": "user", "content": content}]
        template = self.processor.apply_chat_template

        def answered(option: str) -> str:
            said: Any = option if image is None else [{"type": "text", "text": option}]
            return str(template([*turns, {"role": "assistant", "content": said}], tokenize=False))

        opened = template(turns, tokenize=False, add_generation_prompt=True)
        return [str(opened), *(answered(option) for option in options)]

    def _encode(self, texts: list[str], image: Any) -> dict[str, Any]:
        device = next(self.model.parameters()).device
        # A chat template writes the special tokens itself.
        special = {"add_special_tokens": not self.chat}
        if image is not None:
            if not hasattr(self.processor, "tokenizer"):
                raise InputError("image is given, and a tokenizer reads text alone: pass the model's processor")
            batch = self.processor(
                text=texts,
                images=[image] * len(texts),
                padding=True,
                padding_side="right",
                return_tensors="pt",
                **special,
            )
            return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        rows = [torch.tensor(ids, dtype=torch.long) for ids in tokenizer(texts, verbose=False, **special)["input_ids"]]
        lengths = torch.tensor([len(r) for r in rows])
        # Which token pads does not matter: it is masked, and nothing that is scored stands behind it.
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        attended = torch.arange(ids.shape[1]) < lengths[:, None]
        return {"input_ids": ids.to(device), "attention_mask": attended.long().to(device)}


def _rows(value: Any, part: slice, n_texts: int, width: int) -> Any:
    """The part of a processor's output that belongs to some of the texts; token-wise ones without needless padding."""
    if not isinstance(value, Tensor):
        return value
    if value.shape[0] != n_texts:
        # Patches of all images in one row after another, the same number for each text.
        each = value.shape[0] // n_texts
        part = slice(part.start * each, min(part.stop, n_texts) * each)
        return value[part]
    return value[part][:, :width] if value.ndim == 2 and not value.dtype.is_floating_point else value[part]


def _check_options(options: Sequence[str]) -> None:
    strings = not isinstance(options, str) and all(isinstance(o, str) for o in options)
    if not strings or len(options) < 2 or len(set(options)) < len(options):
        raise InputError(f"options are {options!r}: options must be at least 2 distinct strings")


# ---- what is known of a distribution -----------------------------------------------------------------------------


def routing_features(
    probs: Float[Array, "n options"], affinity: Float[Array, "n"] | float = 0.0
) -> Float[Array, "n 4"]:
    """What the router looks at: largest probability, margin over the second, entropy (nats), affinity.

    Args:
        probs: one distribution a question; 0 for an absent option.
        affinity: mean similarity of the nearest solved questions, as `same_type_neighbours` gives it.

    Raises:
        InputError: rows are no distributions, or the affinities do not fit.

    Source:
        "BOLT: Decision-Aligned Distillation and Budget-Aware Routing for Constrained Multimodal QA on Robots",
        openreview:Vsy3nAnaX6, routing features f = (p_max, margin, H, ρ).

    Example:
        >>> import numpy as np
        >>> from assay.compress import routing_features
        >>> routing_features(np.array([[0.5, 0.3, 0.2]]), 0.8).round(6).tolist()
        [[0.5, 0.2, 1.029653, 0.8]]
    """
    p = _distributions(probs)
    near = _floats(affinity, "affinity")
    if near.ndim == 0:
        near = np.full(len(p), float(near))
    if near.shape != (len(p),):
        raise InputError(f"affinity has shape {near.shape}: give one number, or one for each of {len(p)} questions")
    return _features(p, near)


def _features(p: Array, affinity: Array) -> Array:
    top = np.partition(p, -2, axis=1)[:, -2:]
    return np.column_stack([top[:, 1], top[:, 1] - top[:, 0], entr(p).sum(1), affinity])


def option_agreement(probs: Float[Array, "*batch rounds options"]) -> Float[Array, "*batch"]:
    """How far several distributions over the same options agree: κ = 1 − mean pairwise Jensen–Shannon divergence.

    The divergence is in nats, so that two rounds that contradict each other agree to 1 − ln 2.

    Args:
        probs: at least two rounds; 0 for an absent option.

    Returns:
        From 0 to 1; 1 where all rounds say the same.

    Raises:
        InputError: fewer than two rounds, or rows are no distributions.

    Source:
        "BOLT: Decision-Aligned Distillation and Budget-Aware Routing for Constrained Multimodal QA on Robots",
        openreview:Vsy3nAnaX6, agreement κ of decompositions.

    Example:
        >>> import numpy as np
        >>> from assay.compress import option_agreement
        >>> float(option_agreement(np.eye(2)).round(6))
        0.306853
    """
    p = _floats(probs, "probs")
    if p.ndim < 2 or p.shape[-2] < 2:
        raise InputError(f"probs have shape {p.shape}: agreement needs [..., rounds, options] with at least 2 rounds")
    i, j = np.triu_indices(p.shape[-2], 1)
    p = _distributions(p.reshape(-1, p.shape[-1])).reshape(p.shape)
    a, b = np.take(p, i, axis=-2), np.take(p, j, axis=-2)
    js = entr((a + b) / 2).sum(-1) - (entr(a).sum(-1) + entr(b).sum(-1)) / 2
    return np.clip(1 - js.mean(-1), 0.0, 1.0)


@dataclass(frozen=True)
class Neighbours:
    """The nearest solved questions of the same type.

    Attributes:
        index: rows of the bank, nearest first; −1 where there are no more of the type.
        similarity: their cosines; 0 where there is none.
        affinity: mean cosine over those that there are; 0 where there is none.
    """

    index: Int[Array, "n k"]
    similarity: Float[Array, "n k"]
    affinity: Float[Array, "n"]


def same_type_neighbours(
    queries: Float[Array, "n dim"],
    bank: Float[Array, "m dim"],
    query_types: Int[Array, "n"] | None = None,
    bank_types: Int[Array, "m"] | None = None,
    *,
    k: int = 4,
    exclude: Int[Array, "n"] | None = None,
) -> Neighbours:
    """The k solved questions of the same type that are nearest to each question, by cosine.

    Args:
        queries: vectors of the questions.
        bank: vectors of the solved questions.
        query_types: the type of each question; None: all are of one.
        bank_types: the same for the bank.
        k: how many.
        exclude: a row of the bank that each question must not find, itself say; −1 for none.

    Raises:
        InputError: shapes disagree, vectors are not finite, k is below 1, or only one side has types.

    Source:
        "BOLT: Decision-Aligned Distillation and Budget-Aware Routing for Constrained Multimodal QA on Robots",
        openreview:Vsy3nAnaX6, type-matched retrieval with K_r = 4, and affinity ρ.

    Example:
        >>> import numpy as np
        >>> from assay.compress import same_type_neighbours
        >>> found = same_type_neighbours(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0], [2.0, 0.0]]), k=1)
        >>> found.index.tolist(), found.affinity.tolist()
        ([[1]], [1.0])
    """
    q, b = _floats(queries, "queries"), _floats(bank, "bank")
    if q.ndim != 2 or b.ndim != 2 or q.shape[1] != b.shape[1]:
        raise InputError(f"queries have shape {q.shape} and bank {b.shape}: both are [rows, dim] with the same dim")
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise InputError(f"k is {k!r}: give a whole number of neighbours, at least 1")
    if (query_types is None) != (bank_types is None):
        raise InputError("query_types and bank_types go together: give both or neither")
    for name, rows in (("queries", q), ("bank", b)):
        if not np.isfinite(rows).all():
            raise InputError(f"{name} have entries that are not finite: leave those rows out")
    kinds = [
        np.zeros(len(rows), dtype=int) if t is None else np.asarray(t)
        for t, rows in ((query_types, q), (bank_types, b))
    ]
    out = np.full(len(q), -1) if exclude is None else np.asarray(exclude)
    if kinds[0].shape != (len(q),) or kinds[1].shape != (len(b),) or out.shape != (len(q),):
        raise InputError("query_types, bank_types and exclude take one entry for each row of what they describe")
    q, b = _unit(q), _unit(b)
    index = np.full((len(q), k), -1)
    similarity = np.zeros((len(q), k))
    found = min(k, len(b))
    step = max(1, _SIMILARITIES // max(1, len(b)))
    for first in range(0, len(q) if found else 0, step):
        part = slice(first, first + step)
        cosine = q[part] @ b.T
        cosine[kinds[0][part, None] != kinds[1]] = -np.inf
        rows = np.flatnonzero(out[part] >= 0)
        cosine[rows, out[part][rows]] = -np.inf
        near = np.argpartition(-cosine, found - 1, axis=1)[:, :found]
        # In the order of the bank first, so that the stable sort takes equally near ones in that order.
        near.sort(axis=1)
        order = np.argsort(-np.take_along_axis(cosine, near, axis=1), axis=1, kind="stable")
        near = np.take_along_axis(near, order, axis=1)
        value = np.take_along_axis(cosine, near, axis=1)
        there = np.isfinite(value)
        index[part, :found] = np.where(there, near, -1)
        similarity[part, :found] = np.where(there, value, 0.0)
    count = (index >= 0).sum(1)
    return Neighbours(index, similarity, similarity.sum(1) / np.maximum(count, 1))


def _unit(rows: Array) -> Array:
    norm = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norm > 0, norm, 1.0)


def option_temperature(scores: Float[Array, "n options"], answer: Int[Array, "n"]) -> float:
    """The temperature τ with the least mean −log softmax(scores / τ)[answer] on solved questions.

    The loss is convex in 1/τ, so its slope has one root, which is bracketed and found. τ is kept between 0.01 and 100:
    scores that are never wrong would ask for 0, scores that say nothing for infinity.

    Args:
        scores: −inf for an absent option.
        answer: index of the right option.

    Raises:
        InputError: shapes disagree, a score is NaN or +inf, or an answer is not among the options.

    Source:
        "On Calibration of Modern Neural Networks", arXiv 1706.04599; fitted on first-pass scores in BOLT,
        openreview:Vsy3nAnaX6.

    Example:
        >>> import numpy as np
        >>> from assay.compress import option_temperature
        >>> round(option_temperature(np.array([[2.0, 0.0]] * 4), np.array([0, 0, 0, 1])), 4)
        1.8205
    """
    s = _score_rows(scores, "scores")
    y = _answers(answer, s)
    # Scores relative to the right one, and absent options at -inf, where they weigh nothing.
    gap = s - s[np.arange(len(s)), y][:, None]
    finite = np.where(np.isfinite(gap), gap, 0.0)

    def slope(log_beta: float) -> float:
        return float((softmax(np.exp(log_beta) * gap, axis=1) * finite).sum(1).mean())

    low, high = -np.log(_HOTTEST), -np.log(_COLDEST)
    if slope(low) >= 0:
        return _HOTTEST
    if slope(high) <= 0:
        return _COLDEST
    return float(np.exp(-brentq(slope, low, high, xtol=1e-12)))


# ---- how good the answers are ------------------------------------------------------------------------------------


def risk_coverage(
    probs: Float[Array, "n options"], answer: Int[Array, "n"]
) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """Coverage and risk when only the most confident answers are given.

    Args:
        probs: one distribution a question.
        answer: index of the right option.

    Returns:
        Coverage 1/n … 1, and the share of wrong answers among that many most confident. Among equally confident
        answers it is the mean over their orders, so that the order of the rows does not matter.

    Raises:
        InputError: rows are no distributions, or an answer is not among the options.

    Example:
        >>> import numpy as np
        >>> from assay.compress import risk_coverage
        >>> probs = np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
        >>> float(risk_coverage(probs, np.array([0, 1, 0]))[1].mean().round(6))
        0.277778
    """
    p = _distributions(probs)
    y = _answers(answer, p)
    confidence, wrong = p.max(1), p.argmax(1) != y
    order = np.argsort(-confidence, kind="stable")
    ranked, errors = confidence[order], np.cumsum(wrong[order])
    n = np.arange(1, len(p) + 1)
    last = np.append(ranked[1:] < ranked[:-1], True)
    expected = np.interp(n, np.append(0, n[last]), np.append(0, errors[last]))
    return n / len(p), expected / n


@dataclass(frozen=True)
class OptionMetrics(Result):
    """How good a set of answers with probabilities is.

    Attributes:
        n: questions.
        accuracy: share answered rightly.
        ece: expected calibration error over equal bins of the largest probability.
        nll: mean −log of the right option's probability, in nats.
        brier: mean squared distance of the distribution to the right one, from 0 to 2.
        aurc: area under the risk–coverage curve; less is better.
        overconfident_wrong: share of the wrong answers whose probability is at least 0.7; 0 where none is wrong.
        none_misuse: share of all questions answered "none of the above" wrongly; None where no such option was named.
        coverage: of the risk–coverage curve.
        risk: of the risk–coverage curve.
    """

    n: int
    accuracy: float
    ece: float
    nll: float
    brier: float
    aurc: float
    overconfident_wrong: float
    none_misuse: float | None
    coverage: Float[Array, "n"]
    risk: Float[Array, "n"]

    def table(self) -> Table:
        """One row."""
        columns = (
            Column("questions"),
            Column("accuracy", "", "share answered rightly"),
            Column("ECE", "", "expected calibration error"),
            Column("NLL", "nat", "of the right option"),
            Column("Brier", "", "squared distance to the right distribution"),
            Column("AURC", "", "area under the risk-coverage curve"),
            Column("over-confident wrong", "", "share of wrong answers with a probability of at least 0.7"),
            Column("none of the above misused", "", "share of questions wrongly answered so"),
        )
        row = (
            self.n,
            self.accuracy,
            self.ece,
            self.nll,
            self.brier,
            self.aurc,
            self.overconfident_wrong,
            self.none_misuse,
        )
        return Table(columns, (row,), "Answers to multiple choice")

    def figure(self) -> Figure:
        """Risk against coverage."""
        import plotly.graph_objects as go

        figure = go.Figure(go.Scatter(x=self.coverage, y=self.risk, mode="lines", name="risk"))
        figure.update_layout(
            template="plotly_white",
            title=f"Risk–coverage, area {self.aurc:.4f}",
            xaxis_title="share of questions answered, most confident first",
            yaxis_title="share of those answered wrongly",
        )
        return figure


def option_metrics(
    probs: Float[Array, "n options"],
    answer: Int[Array, "n"],
    *,
    none_option: Int[Array, "n"] | None = None,
    bins: int = 15,
) -> OptionMetrics:
    """Accuracy, calibration and selective risk of answers.

    Args:
        probs: one distribution a question; 0 for an absent option.
        answer: index of the right option.
        none_option: index of the option that says "none of the above"; −1 where a question has none.
        bins: equal bins of the largest probability for the calibration error.

    Raises:
        InputError: rows are no distributions, an answer is not among the options, or bins is below 1.

    Source:
        "BOLT: Decision-Aligned Distillation and Budget-Aware Routing for Constrained Multimodal QA on Robots",
        openreview:Vsy3nAnaX6, metrics and hallucination proxies.

    Example:
        >>> import numpy as np
        >>> from assay.compress import option_metrics
        >>> found = option_metrics(np.array([[0.9, 0.1], [0.8, 0.2]]), np.array([0, 1]))
        >>> found.accuracy, found.overconfident_wrong
        (0.5, 1.0)
    """
    if not isinstance(bins, int) or bins < 1:
        raise InputError(f"bins is {bins!r}: give a whole number of at least 1")
    p = _distributions(probs)
    y = _answers(answer, p)
    confidence, chosen = p.max(1), p.argmax(1)
    right = chosen == y
    # Bins are open below and closed above: 1 belongs to the last.
    at = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gap = np.bincount(at, weights=right - confidence, minlength=bins)
    coverage, risk = risk_coverage(p, y)
    with np.errstate(divide="ignore"):
        nll = -np.log(p[np.arange(len(p)), y]).mean()
    misuse = None
    if none_option is not None:
        none = np.asarray(none_option)
        if none.shape != y.shape:
            raise InputError(
                f"none_option has shape {none.shape}: one index for each of {len(y)} questions, -1 for none"
            )
        misuse = float(((chosen == none) & ~right).mean())
    return OptionMetrics(
        n=len(p),
        accuracy=float(right.mean()),
        ece=float(np.abs(gap).sum() / len(p)),
        nll=float(nll),
        brier=float((np.square(p).sum(1) - 2 * p[np.arange(len(p)), y] + 1).mean()),
        aurc=float(risk.mean()),
        overconfident_wrong=float((confidence[~right] >= 0.7).mean()) if not right.all() else 0.0,
        none_misuse=misuse,
        coverage=coverage,
        risk=risk,
    )


# ---- routing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptionLog:
    """What a model said on a set of questions at first, and what it said after each action on its own.

    Attributes:
        base: scores of the first pass; −inf for an absent option.
        actions: for each action, scores of the same questions; [n, rounds, options] for an action that asks several
            times: its rounds are calibrated one by one and averaged.
        answer: index of the right option; None where it is not known: then nothing can be fitted to it.
        affinity: mean similarity of the nearest solved questions; None: 0 for all.
    """

    base: Float[Array, "n options"]
    actions: Mapping[str, Float[Array, "n options"] | Float[Array, "n rounds options"]]
    answer: Int[Array, "n"] | None = None
    affinity: Float[Array, "n"] | None = None

    def __post_init__(self) -> None:
        base = _score_rows(self.base, "base")
        actions = {name: _floats(s, f"scores of {name}") for name, s in self.actions.items()}
        for name, s in actions.items():
            if s.ndim not in (2, 3) or s.shape[0] != base.shape[0] or s.shape[-1] != base.shape[1] or not s.size:
                raise InputError(
                    f"scores of {name} have shape {s.shape} and base {base.shape}: questions and options agree"
                )
            _score_rows(s.reshape(-1, s.shape[-1]), f"scores of {name}")
            missing = np.isneginf(base)
            if (np.isneginf(s) != (missing if s.ndim == 2 else missing[:, None])).any():
                raise InputError(f"scores of {name} miss other options than base: -inf marks an option that is absent")
        affinity = np.zeros(len(base)) if self.affinity is None else _floats(self.affinity, "affinity")
        if affinity.shape != (len(base),) or not np.isfinite(affinity).all():
            raise InputError(
                f"affinity has shape {affinity.shape}: one finite number for each of {len(base)} questions"
            )
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "actions", actions)
        object.__setattr__(self, "affinity", affinity)
        if self.answer is not None:
            object.__setattr__(self, "answer", _answers(self.answer, base))

    def __len__(self) -> int:
        return len(self.base)

    def take(self, rows: Int[Array, "m"] | slice) -> OptionLog:
        """Some of the questions."""
        return OptionLog(
            self.base[rows],
            {name: s[rows] for name, s in self.actions.items()},
            None if self.answer is None else self.answer[rows],
            None if self.affinity is None else self.affinity[rows],
        )


@dataclass(frozen=True)
class DecisionStep:
    """One thing that the router had done.

    Attributes:
        action: its name.
        utility: expected gain per cost that it was chosen for.
        cost: what it cost.
        probs: the calibrated distribution that it gave.
        agreement: κ of its rounds; None where it had one.
    """

    action: str
    utility: float
    cost: float
    probs: Float[Array, "options"]
    agreement: float | None


@dataclass(frozen=True)
class Decision:
    """The answer to one question.

    Attributes:
        option: index of the answer.
        probs: the distribution that it was taken from, calibrated.
        cost: of the first pass and all that was done after it.
        trace: what was done, in order.
    """

    option: int
    probs: Float[Array, "options"]
    cost: float
    trace: tuple[DecisionStep, ...] = field(default=())


@dataclass(frozen=True)
class RoutingResult(Result):
    """The answers to many questions, and what was done for them.

    Attributes:
        names: the actions.
        option: index of each answer.
        probs: the distribution that it was taken from, calibrated.
        cost: of the first pass and all that was done after it.
        actions: what was done in each round, as an index of `names`; −1 for nothing.
        utility: expected gain per cost of what was done, or of the best that was not; −inf where nothing was left.
        source: where the answer is from: −1 for the first pass, else an index of `names`.
        first: index of the answer of the first pass.
    """

    names: tuple[str, ...]
    option: Int[Array, "n"]
    probs: Float[Array, "n options"]
    cost: Float[Array, "n"]
    actions: Int[Array, "n rounds"]
    utility: Float[Array, "n rounds"]
    source: Int[Array, "n"]
    first: Int[Array, "n"]

    @property
    def mean_cost(self) -> float:
        """Mean cost of a question."""
        return float(self.cost.mean())

    @property
    def flips(self) -> float:
        """Share of questions whose answer is not that of the first pass."""
        return float((self.option != self.first).mean())

    def table(self) -> Table:
        """One row an action."""
        columns = (
            Column("action"),
            Column("used", "", "share of questions that it was done for"),
            Column("answered", "", "share of questions whose answer is from it"),
        )
        rows = [("first pass", 1.0, float((self.source == -1).mean()))]
        rows += [
            (name, float((self.actions == i).any(1).mean()), float((self.source == i).mean()))
            for i, name in enumerate(self.names)
        ]
        title = f"Routing of {len(self.option)} questions: mean cost {self.mean_cost:.3f}, {self.flips:.1%} flipped"
        return Table(columns, tuple(rows), title)

    def figure(self) -> Figure:
        """How often each action was done, and how often it gave the answer."""
        import plotly.graph_objects as go

        rows = list(self.table())
        names = [r[0] for r in rows]
        figure = go.Figure(
            [
                go.Bar(x=names, y=[r[1] for r in rows], name="used"),
                go.Bar(x=names, y=[r[2] for r in rows], name="answered"),
            ]
        )
        figure.update_layout(
            template="plotly_white", title=f"Mean cost {self.mean_cost:.3f}", yaxis_title="share of questions"
        )
        return figure


class BudgetRouter:
    """Spends extra work on a question only where a learned gain per cost is worth it.

    For each action a logistic regression on `routing_features` of the present distribution gives the probability that
    the action turns a wrong first answer right. The action with the largest utility, gain × weight / cost, among those
    that are affordable and not yet used is done if its utility reaches the threshold; its distribution gives new
    features, and so on. The answer is taken from the distribution with the largest calibrated probability.

    Probabilities are calibrated by one temperature, fitted on first-pass scores.

    Args:
        costs: of each action, in units of the first pass, which costs 1. Default: HR 0.5 (look again, closer), tmRAG
            0.3 (with solved examples of the same type), QD 0.35 (in several sub-questions).
        budget: most that one question may cost, first pass included.
        max_rounds: most actions for one question.
        weights: of each action; 1 for those not named.
        threshold: least utility; `tune` sets it to a mean cost.
        class_weight: "balanced" counts the rare questions that an action helps as much as the others. Gains are then
            no probabilities any more, and a rare action looks as good as a frequent one.

    Attributes:
        temperature_: of the calibration.
        models_: for each action, coefficients of the features and an intercept.

    Raises:
        InputError: a cost or weight is not positive, a weight is of no action, or the budget is below 1.

    Source:
        "BOLT: Decision-Aligned Distillation and Budget-Aware Routing for Constrained Multimodal QA on Robots",
        openreview:Vsy3nAnaX6, budget-aware test-time augmentation.

    Example:
        >>> import numpy as np
        >>> from assay.compress import BudgetRouter, OptionLog
        >>> rng = np.random.default_rng(0)
        >>> answer = rng.integers(4, size=400)
        >>> truth = 3 * np.eye(4)[answer]
        >>> log = OptionLog(
        ...     base=truth + 2 * rng.normal(size=(400, 4)), actions={"look": truth + rng.normal(size=(400, 4))},
        ...     answer=answer,
        ... )
        >>> router = BudgetRouter({"look": 0.5}).fit(log.take(slice(200))).tune(log.take(slice(200)), mean_cost=1.2)
        >>> routed = router.route(log.take(slice(200, 400)))
        >>> bool(routed.cost.max() <= 1.5)
        True
    """

    temperature_: float
    models_: dict[str, Float[Array, "5"]]

    def __init__(
        self,
        costs: Mapping[str, float] | None = None,
        *,
        budget: float = 2.0,
        max_rounds: int = 2,
        weights: Mapping[str, float] | None = None,
        threshold: float = 0.0,
        class_weight: Literal["balanced"] | None = None,
    ) -> None:
        self.costs = dict(_COSTS if costs is None else costs)
        self.weights = dict.fromkeys(self.costs, 1.0) | dict(weights or {})
        if not self.costs:
            raise InputError("costs name no action: there is nothing to route to")
        for name, cost in self.costs.items():
            _check_positive(f"cost of {name}", cost)
        for name, weight in self.weights.items():
            if name not in self.costs:
                raise InputError(f"weights name {name!r}, which has no cost: actions are {', '.join(self.costs)}")
            _check_positive(f"weight of {name}", weight)
        if not budget >= 1:
            raise InputError(f"budget is {budget}: the first pass alone costs 1")
        if not isinstance(max_rounds, int) or isinstance(max_rounds, bool) or max_rounds < 1:
            raise InputError(f"max_rounds is {max_rounds!r}: give a whole number of at least 1")
        if class_weight not in (None, "balanced"):
            raise InputError(f'class_weight is {class_weight!r}: use None or "balanced"')
        self.budget = budget
        self.max_rounds = max_rounds
        self.threshold = threshold
        self.class_weight = class_weight

    def fit(self, log: OptionLog) -> Self:
        """Fits the temperature and the gain of each action.

        Args:
            log: solved questions that the model was not trained on, with the scores of every action. Use other ones
                for `tune`.

        Raises:
            InputError: the log has no answers or lacks an action.
        """
        if log.answer is None:
            raise InputError("log has no answers: gains are learned from solved questions")
        self.temperature_ = option_temperature(log.base, log.answer)
        base = self._calibrated(log.base)
        features = _features(base, _known(log.affinity))
        wrong = base.argmax(1) != log.answer
        self.models_ = {
            name: self._gain_model(features, wrong & (self._calibrated(self._of(log, name)).argmax(1) == log.answer))
            for name in self.costs
        }
        return self

    def _gain_model(self, features: Array, helped: Bool[Array, "n"]) -> Array:
        from sklearn.linear_model import LogisticRegression

        # Where an action always or never helps there is nothing to tell apart: its rate, drawn towards one half.
        if helped.all() or not helped.any():
            rate = (helped.sum() + 0.5) / (len(helped) + 1)
            return np.array([0.0, 0.0, 0.0, 0.0, np.log(rate / (1 - rate))])
        centre, scale = features.mean(0), features.std(0)
        # A feature that varies by rounding alone must not be blown up.
        scale = np.where(scale > 1e-9, scale, 1.0)
        model = LogisticRegression(class_weight=self.class_weight, max_iter=1000)
        model.fit((features - centre) / scale, helped)
        slope = model.coef_[0] / scale
        return np.append(slope, model.intercept_[0] - slope @ centre)

    def gains(self, features: Float[Array, "n 4"]) -> Float[Array, "n actions"]:
        """For each question and action, the probability that the action turns a wrong answer right.

        Args:
            features: as `routing_features` gives them.

        Raises:
            NotApplicable: the router is not fitted.
        """
        self._check_fitted()
        weights = np.stack([self.models_[name] for name in self.costs])
        return np.asarray(expit(features @ weights[:, :4].T + weights[:, 4]))

    def tune(self, log: OptionLog, mean_cost: float) -> Self:
        """Sets the smallest threshold whose mean cost on these questions is at most `mean_cost`.

        What is done for a question, and in which order, does not depend on the threshold: that only says when to stop.
        So all thresholds are read off one pass.

        Args:
            log: questions other than those of `fit`; answers are not looked at.
            mean_cost: from 1.

        Raises:
            InputError: `mean_cost` is below 1, or the log lacks an action.
            NotApplicable: the router is not fitted.
        """
        if not mean_cost >= 1:
            raise InputError(f"mean_cost is {mean_cost}: the first pass alone costs 1")
        routed = self._route(log, -np.inf)
        done = routed.actions >= 0
        spent = np.where(done, np.array(list(self.costs.values()))[routed.actions], 0.0)
        # A round is reached if its utility and those of all rounds before it reach the threshold.
        least = np.minimum.accumulate(np.where(done, routed.utility, -np.inf), axis=1)
        order = np.argsort(-least, axis=None, kind="stable")
        cost = 1 + np.cumsum(spent.ravel()[order]) / len(log)
        levels = least.ravel()[order]
        # Equal utilities stand or fall together: what counts is the cost at the last of them.
        last = np.append(levels[1:] < levels[:-1], True)
        fits = last & (cost <= mean_cost + _SLACK) & np.isfinite(levels)
        self.threshold = float(levels[fits][-1]) if fits.any() else np.inf
        return self

    def route(self, log: OptionLog) -> RoutingResult:
        """Answers questions whose scores after every action are at hand; the same as `run` on each.

        Raises:
            InputError: the log lacks an action.
            NotApplicable: the router is not fitted.
        """
        return self._route(log, self.threshold)

    def run(
        self,
        question: Any,
        predict: Callable[[Any], Any],
        actions: Mapping[str, Callable[[Any], Any]],
        *,
        affinity: float = 0.0,
    ) -> Decision:
        """Answers one question, doing no more than is worth it.

        Args:
            question: whatever the callables take.
            predict: gives the scores of the options on a first pass, [options].
            actions: the same for each action, [options] or [rounds, options]; called only if chosen.
            affinity: mean similarity of the nearest solved questions.

        Raises:
            InputError: an action that has a cost is missing, or scores are of the wrong shape or not finite.
            NotApplicable: the router is not fitted.
        """
        self._check_fitted()
        missing = [name for name in self.costs if name not in actions]
        if missing:
            raise InputError(f"actions lack {missing[0]!r}: give a callable for each of {', '.join(self.costs)}")
        scores = np.atleast_1d(_floats(predict(question), "scores of the first pass"))
        names = list(self.costs)
        rounds: dict[int, Array] = {}

        def do(action: int, rows: Array) -> Array:
            found = _floats(actions[names[action]](question), f"scores of {names[action]}")
            one = OptionLog(scores[None], {names[action]: found[None]})
            rounds[action] = one.actions[names[action]]
            return self._calibrated(rounds[action])

        base = self._calibrated(_score_rows(scores[None], "scores of the first pass"))
        routed, steps = self._walk(base, do, np.array([float(affinity)]), self.threshold)
        trace = tuple(
            DecisionStep(names[a], float(u), self.costs[names[a]], p[0], self._agreement(rounds[a]))
            for a, u, p in zip(routed.actions[0], routed.utility[0], steps, strict=True)
            if a >= 0
        )
        return Decision(int(routed.option[0]), routed.probs[0], float(routed.cost[0]), trace)

    def _agreement(self, scores: Array) -> float | None:
        if scores.ndim < 3 or scores.shape[1] < 2:
            return None
        return float(option_agreement(softmax(scores[0] / self.temperature_, axis=-1)))

    def _check_fitted(self) -> None:
        if not hasattr(self, "models_"):
            raise NotApplicable("the router is not fitted: call fit with a log of solved questions")

    def _calibrated(self, scores: Array) -> Array:
        p = softmax(scores / self.temperature_, axis=-1)
        return np.asarray(p.mean(1) if p.ndim == 3 else p)

    def _of(self, log: OptionLog, name: str) -> Array:
        if name not in log.actions:
            known = ", ".join(log.actions) or "none"
            raise InputError(f"log has no scores of action {name!r}: it has {known}")
        return log.actions[name]

    def _route(self, log: OptionLog, threshold: float) -> RoutingResult:
        self._check_fitted()
        tables = [self._calibrated(self._of(log, name)) for name in self.costs]
        base = self._calibrated(log.base)
        return self._walk(base, lambda action, rows: tables[action][rows], _known(log.affinity), threshold)[0]

    def _walk(
        self, base: Array, do: Callable[[int, Array], Array], affinity: Array, threshold: float
    ) -> tuple[RoutingResult, list[Array]]:
        """The greedy rule over all questions at once; `do` gives an action's distributions for some rows."""
        n = len(base)
        cost = np.array([self.costs[name] for name in self.costs])
        worth = np.array([self.weights[name] for name in self.costs]) / cost
        present, probs = base.copy(), base.copy()
        spent, source = np.ones(n), np.full(n, -1)
        used = np.zeros((n, len(cost)), dtype=bool)
        actions = np.full((n, self.max_rounds), -1)
        utility = np.full((n, self.max_rounds), -np.inf)
        active = np.ones(n, dtype=bool)
        steps = []
        for r in range(self.max_rounds):
            u = self.gains(_features(present, affinity)) * worth
            u[used | (cost > self.budget - spent[:, None] + _SLACK)] = -np.inf
            best = u.argmax(1)
            utility[:, r] = np.where(active, u[np.arange(n), best], -np.inf)
            active &= (utility[:, r] >= threshold) & np.isfinite(utility[:, r])
            for a in range(len(cost)):
                rows = np.flatnonzero(active & (best == a))
                if not rows.size:
                    continue
                present[rows] = do(a, rows)
                spent[rows] += cost[a]
                used[rows, a] = True
                actions[rows, r] = a
                surer = rows[present[rows].max(1) > probs[rows].max(1)]
                probs[surer], source[surer] = present[surer], a
            steps.append(present.copy())
        result = RoutingResult(
            tuple(self.costs), probs.argmax(1), probs, spent, actions, utility, source, base.argmax(1)
        )
        return result, steps


# ---- checks ------------------------------------------------------------------------------------------------------


def _known(affinity: Array | None) -> Array:
    # OptionLog fills it in; this tells the type checker so.
    assert affinity is not None
    return affinity


def _floats(values: Any, name: str) -> Array:
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} hold something other than numbers: pass an array or a tensor") from error


def _score_rows(values: Any, name: str) -> Array:
    s = _floats(values, name)
    if s.ndim != 2 or s.shape[0] < 1 or s.shape[1] < 2:
        raise InputError(
            f"{name} have shape {s.shape}: pass [questions, options] with at least 1 question and 2 options"
        )
    if np.isnan(s).any() or np.isposinf(s).any():
        raise InputError(f"{name} have entries that are NaN or +inf: only -inf is allowed, for an absent option")
    if (np.isfinite(s).sum(1) < 2).any():
        row = int(np.flatnonzero(np.isfinite(s).sum(1) < 2)[0])
        raise InputError(f"{name} leave question {row} fewer than 2 options: a choice needs at least 2")
    return s


def _distributions(values: Any) -> Array:
    p = _floats(values, "probs")
    if p.ndim != 2 or p.shape[0] < 1 or p.shape[1] < 2:
        raise InputError(
            f"probs have shape {p.shape}: pass [questions, options] with at least 1 question and 2 options"
        )
    # float32 rows of many options sum to 1 within a few of its last digits, bfloat16 ones within a hundredth.
    total = p.sum(1)
    bad = np.flatnonzero(~((np.abs(total - 1) < 2e-2) & (p >= 0).all(1)))
    if bad.size:
        raise InputError(f"probs of question {bad[0]} are no distribution: they sum to {total[bad[0]]:.4g}")
    return p / total[:, None]


def _answers(answer: Any, rows: Array) -> Array:
    y = np.asarray(answer.detach().cpu() if isinstance(answer, Tensor) else answer)
    if y.shape != (len(rows),) or y.dtype.kind not in "iu":
        raise InputError(
            f"answer is {y.dtype} of shape {y.shape}: pass the index of the right option for each of {len(rows)}"
        )
    outside = np.flatnonzero((y < 0) | (y >= rows.shape[1]))
    if not outside.size:
        outside = np.flatnonzero(np.isneginf(rows[np.arange(len(y)), y]))
    if outside.size:
        raise InputError(f"answer of question {outside[0]} is {y[outside[0]]}: it is not among the options")
    return y.astype(np.int64)
