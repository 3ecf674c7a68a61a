"""How every figure of a report is computed: name, formula, and what it says."""

FIGURES: tuple[tuple[str, str, str], ...] = (
    (
        "bits per weight",
        "8 \N{MULTIPLICATION SIGN} stored bytes / elements",
        "scales are counted; of quantized weights only",
    ),
    (
        "relative error",
        "\u221a(\u03a3(v \u2212 x)\u00b2 / \u03a3x\u00b2)",
        "Frobenius norms; x is an element of the source, v the number stored for it",
    ),
    (
        "SQNR",
        "10 log\u2081\u2080(\u03a3x\u00b2 / \u03a3(v \u2212 x)\u00b2) dB",
        "signal over quantization noise; 6 dB more is half the error. Of several weights, both "
        "sums run over all of them",
    ),
    ("cosine", "\u03a3xv / \u221a(\u03a3x\u00b2 \u03a3v\u00b2)", "1 where the direction is kept"),
    (
        "step",
        "scale \u00d7 global scale",
        "what a code of value 1 stands for in a block",
    ),
    (
        "mean error, bias",
        "\u03a3|v \u2212 x| / step / n, \u03a3(v \u2212 x) / step / n",
        "in steps; a bias that is not near 0 means that rounding leans to one side",
    ),
    ("zeros made", "x \u2260 0 and v = 0", "elements too small beside the largest of their block"),
    ("clipped", "|x| / step > largest value", "elements beyond the largest value of their block"),
    ("underflow", "x \u2260 0 and step = 0", "blocks so small that their scale became zero"),
    (
        "outside",
        "x / step not in [m\u207b, m\u207a]",
        "m are the midpoints between the stored code's value and its neighbours': 0 proves that "
        "every code is a nearest one",
    ),
    (
        "error histogram",
        "(v \u2212 x) / step / h",
        "h is half the widest gap of the grid: the largest error that rounding makes",
    ),
    (
        "times",
        "\u03a3(v \u2212 x)\u00b2 of a block / their mean over the weight's blocks",
        "how far a block stands out; where a scale is for a row or matrix, a row is a block",
    ),
)
EXACT = (
    "Sums are taken in fp64 over bands of 128 rows in order; counts are whole numbers. No figure "
    "depends on how a weight was cut. Elements are held to the codes that lowbit itself computed "
    "exactly, with ties to even, and to others within the tolerance that its check names."
)
