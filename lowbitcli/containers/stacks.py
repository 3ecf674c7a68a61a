"""How models stack their experts in one tensor: which axis is multiplied, and where the rows of
gate and up are.

| word | a stack is | as weights `[E, out, in]` |
|---|---|---|
| `out_in` | `[E, out, in]` | as it is |
| `in_out` | `[E, in, out]` | transposed |
| `halves` | of gate and up: all rows of gate, then all of up | |
| `interleaved` | of gate and up: a row of gate, a row of up, and so on | |

Nothing is told from a shape: where both axes could be blocks, both look right. A shape that is not
the one which the words and the model's `hidden_size` demand makes a stack one of which nothing is
known. A stack of a model that is not listed is kept, unless a recipe says how it lies.
Source: transformers 5.24, the classes of experts in `models/*/modeling_*.py` and the names and
transpositions in `conversion_mapping.py`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lowbitcli.containers.layouts import IDENTITY, TRANSPOSED, Layout
from lowbitcli.tensors import Shape

LAYOUTS: dict[str, Layout] = {"out_in": IDENTITY, "in_out": TRANSPOSED}
ROWS = ("halves", "interleaved")
WORDS = (*LAYOUTS, *(f"{axes} {rows}" for axes in LAYOUTS for rows in ROWS))

# The ends of the names of stacked experts; the first group is what stands before the expert's
# number where experts are stored one by one, the second the module that is then one expert's.
EXPERTS = re.compile(r"((?:.*\.)?experts)\.(gate_up_proj|down_proj|gate_proj|up_proj|w1|w2|w3)")
# Stacks whose experts no reader takes one by one: Granite's and JetMoE's, Aria's, Step's.
WHOLE = re.compile(
    r"(?:.*\.)?(?:(?:block_sparse_moe|mlp|moe|experts)\.(?:input|output)_linear"
    r"|experts\.fc[12]|moe\.(?:gate|up|down)_proj)"
)
FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}
BIASES = ("_bias", ".bias")

# Models whose single experts are called w1 (gate), w3 (up) and w2 (down), in their releases and by
# programs that serve them: transformers 5.24 `conversion_mapping.py`, vLLM 0.33 and SGLang 0.5.23
# `models/*.py`. Those of all others of MODELS are called as their stacks.
_LETTERS = """
kimi_linear lfm2_moe minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text mixtral phimoe
"""
LETTERS = frozenset(_LETTERS.split())
_LETTER_OF = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_NAME_OF = {letter: name for name, letter in _LETTER_OF.items()}

# Models whose class of experts multiplies gate_up_proj `[E, 2I, H]`, and takes two halves of it.
_OUT_IN_HALVES = """
afmoe axk1 axk2 bailing_hybrid cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 diffusion_gemma
diffusion_gemma_text dots1 ernie4_5_moe exaone_moe flex_olmo gemma4 gemma4_text glm4_moe
glm4_moe_lite glm4v_moe glm4v_moe_text glm_moe_dsa granitemoe granitemoe_swa granitemoehybrid
granitemoeshared hunyuan_v1_moe hy_v3 jamba jetmoe kimi_linear laguna lfm2_moe mellum mimo_v2_flash
minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text mistral4 mixtral muse_spark muse_spark_text
olmoe phimoe qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe
qwen3_omni_moe_text qwen3_omni_moe_thinker solar_open step3p7 zaya
"""


@dataclass(frozen=True)
class Stacking:
    """How a stack lies: `axes` is a key of LAYOUTS, `rows` one of ROWS or "" where nothing says;
    only a stack of gate and up has an order of rows."""

    axes: str
    rows: str = ""

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.axes]

    @classmethod
    def of(cls, words: str) -> "Stacking":
        """Return what `words` (one of WORDS) say."""
        axes, _, rows = words.partition(" ")
        return cls(axes, rows)


MODELS: dict[str, Stacking] = {
    **dict.fromkeys(_OUT_IN_HALVES.split(), Stacking("out_in", "halves")),
    "gpt_oss": Stacking("in_out", "interleaved"),
    "openai_privacy_filter": Stacking("in_out", "halves"),
    "llama4": Stacking("in_out", "halves"),
    "llama4_text": Stacking("in_out", "halves"),
    "aria": Stacking("in_out", "halves"),
    "aria_text": Stacking("in_out", "halves"),
    # published transposed; transformers turns it where the shape is not its own
    "qwen3_vl_moe": Stacking("in_out", "halves"),
    "qwen3_vl_moe_text": Stacking("in_out", "halves"),
}

# Models whose experts transformers 5.24 does not take one by one (`conversion_mapping.py`).
_NOT_SINGLY = """
diffusion_gemma diffusion_gemma_text gemma4 gemma4_text gpt_oss granitemoe_swa llama4 llama4_text
mistral4 muse_spark muse_spark_text openai_privacy_filter qwen3_vl_moe qwen3_vl_moe_text zaya
"""
NOT_SINGLY = frozenset(_NOT_SINGLY.split())


class View(NamedTuple):
    """One expert of a stack: matrix `matrix`, every `step`-th of its rows from `first` on."""

    matrix: int
    first: int = 0
    step: int = 1


class Expert(NamedTuple):
    """A matrix of a stack as a tensor of its own: what it is called, its rows, where they are."""

    name: str
    rows: int
    view: View


def called_as(model: str) -> str:
    """Return what members of single experts of a model are called: `letters` (w1), `names`
    (gate_proj), or "" of a model that is not known."""
    if model in LETTERS:
        return "letters"
    return "names" if model in MODELS else ""


def members_of(module: str, called: str) -> tuple[str, ...]:
    """Return what the members of a stack `module` are called in single experts."""
    names = FUSED.get(module, (module,))
    table = {"letters": _LETTER_OF, "names": _NAME_OF}.get(called, {})
    return tuple(table.get(name, name) for name in names)


def is_stack(name: str, dimensions: int) -> bool:
    """Does a name say that a tensor is a stack of experts?"""
    if dimensions != 3:
        return False
    stem = name.removesuffix(".weight")
    return EXPERTS.fullmatch(stem) is not None or WHOLE.fullmatch(stem) is not None


def stacking_of(name: str, shape: Shape, config: Mapping[str, Any] | None) -> Stacking | None:
    """Return how the stack of experts `name` lies in a model of this config.json; None where it is
    no stack of experts, nothing says, or it is not of the shape that this model's has."""
    config = config or {}
    found = MODELS.get(str(config.get("model_type")))
    if found is None or not is_stack(name, len(shape)):
        return None
    return found if fits(name, shape, found, config) else None


def fits(name: str, shape: Shape, said: Stacking, config: Mapping[str, Any]) -> bool:
    """Is the axis of a stack that must have the model's hidden size as long as that?"""
    nested = config.get("text_config")
    hidden = config.get("hidden_size")
    if hidden is None and isinstance(nested, Mapping):
        hidden = nested.get("hidden_size")
    if not isinstance(hidden, int):
        return True
    out = re.search(r"(?:down_proj|w2|fc2|output_linear)$", name.removesuffix(".weight"))
    rows_first = said.axes == "out_in"
    return shape[1 if (out is not None) == rows_first else 2] == hidden


def experts_of(name: str, shape: Shape, rows: str, called: str = "") -> tuple[Expert, ...]:
    """Return the experts of a stack of weights `[E, out, in]` as readers call them one by one (see
    `called_as`), those of gate and up apart; none where no reader takes them so, or where nothing
    says which `rows` are whose."""
    found = EXPERTS.fullmatch(name.removesuffix(".weight"))
    if found is None or not shape:
        return ()
    before, module = found.groups()
    members = members_of(module, called)
    if shape[1] % len(members) or (len(members) > 1 and rows not in ROWS):
        return ()
    count = shape[1] // len(members)
    rows = rows if len(members) > 1 else ""
    return tuple(
        Expert(f"{before}.{expert}.{member}.weight", count, _view(expert, place, count, rows))
        for expert in range(shape[0])
        for place, member in enumerate(members)
    )


def modules_kept(
    kept: Iterable[tuple[str, Shape]],
    quantized: Iterable[str],
    *,
    singly: bool = False,
    model: str = "",
) -> set[str]:
    """Return what readers call the experts of kept stacks: the module that has them, where none of
    it is quantized, and with `singly` the modules of the first expert of this `model`, by which
    vLLM's compressed-tensors decides for all."""
    found: set[str] = set()
    busy: set[str] | None = None
    for name, shape in kept:
        if not is_stack(name, len(shape)):
            continue
        if busy is None:
            busy = {module.rpartition(".experts.")[0] for module in quantized}
        stem = name.removesuffix(".weight")
        before = stem.rpartition(".experts.")[0]
        if before and before not in busy:
            found.add(f"{before}.experts")
        if singly:
            members = members_of(stem.rpartition(".")[2], called_as(model))
            found.update(f"{before}.experts.0.{member}" for member in members if before)
    return found


def _view(expert: int, place: int, count: int, rows: str) -> View:
    if rows == "interleaved":
        return View(expert, place, 2)
    return View(expert, place * count)
