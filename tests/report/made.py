"""Verifications to tell of, and what a browser would make of a page."""

from dataclasses import replace
from html.parser import HTMLParser

from lowbitcli.verify import (
    Check,
    Figures,
    Histogram,
    Kept,
    Problem,
    Summary,
    Verification,
    WeightRow,
    WorstBlock,
)

HOSTILE = "<script>alert(1)</script>|*a*`b`\x1b[31m\u202e\n\"'&amp;"
COUNTS = (0, *range(1, 17), *range(16, 0, -1), 2)


def figures(sqnr: float, outside: int | None = 0, **more) -> Figures:
    block = WorstBlock((1, 16), (1, 16), 0.5, 0.125, 3.75, 12.5)
    one = Figures(
        0.25, 10 ** (-sqnr / 20), sqnr, 0.99, outside, None, 3, 1,
        norm=8.0, zeros=300, mean_steps=0.21, bias_steps=-0.001, blocks=256, underflow_blocks=0,
        scale_least=0.5, scale_most=448.0, worst_block=block,
    )  # fmt: skip
    return replace(one, **more)


def row(name: str, sqnr: float = 20.0, scheme: str = "nvfp4", **more) -> WeightRow:
    return WeightRow(name, scheme, "quantized", (64, 64), 8192, 2308, figures(sqnr, **more))


def found(**more) -> Verification:
    one = Verification(
        target="some/where/out",
        source="src",
        container="lowbit",
        problems=(),
        checks=(Check("hashes agree", 20, True), Check("numbers", 0, None, "no source was named")),
        weights=(row("layers.2.a.weight", 21.5), row("layers.10.a.weight", 19.25, "mxfp8")),
        kept=(Kept("norm.weight", "BF16", (64,), "norm"), Kept("x", "F32", (2, 2), "")),
        untouched=2,
        summary=Summary(12, 62896, 32296, 4.5078125, {"kept": (2, 12928), "nvfp4": (6, 13848)}),
        manifest={
            "version": "0.1.0",
            "plan": "ab",
            "source": "cd",
            "files": {"one.safetensors": "ef"},
            "recipe": {"name": "nvfp4"},
        },
        environment={"lowbit": "0.1.0", "torch": "2.13.0", "device": "cpu"},
        errors={"nvfp4": Histogram(1.0, COUNTS)},
    )
    return replace(one, **more)


def hostile() -> Verification:
    from_outside = {"version": HOSTILE, "plan": HOSTILE, "source": HOSTILE}
    return found(
        target=HOSTILE,
        source=HOSTILE,
        container=HOSTILE,
        problems=(Problem(HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
        checks=(Check(HOSTILE, 1, True), Check("x", 0, None, HOSTILE)),
        weights=(row(HOSTILE, scheme=HOSTILE), row(f"{HOSTILE}.1.{HOSTILE}", scheme=HOSTILE)),
        kept=(Kept(HOSTILE, HOSTILE, (1,), HOSTILE),),
        summary=Summary(1, 1, 1, 1.0, {HOSTILE: (1, 1)}),
        manifest={**from_outside, "files": {HOSTILE: HOSTILE}, "recipe": {HOSTILE: HOSTILE}},
        environment={HOSTILE: HOSTILE},
        errors={HOSTILE: Histogram(1.0, COUNTS)},
    )


class Page(HTMLParser):
    """What a browser would make of a page: elements, attributes, text; and is it well nested?"""

    VOID = ("meta", "wbr", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.stack: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack[-1:] != ["style"]:
            self.text.append(data)

    @property
    def all_text(self) -> str:
        return " ".join(" ".join(self.text).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)
