"""Make a corpus to train a small language model on, of the documentation that Debian ships.

    python -m bench.corpus OUT [--megabytes 120] [--packages FOLDER_OF_DEBS]

Packages are fetched with `apt-get download` and unpacked into a temporary folder, nothing is
installed. Of each come the texts (HTML, man pages, plain text, dictionaries), at most a tenth of
the whole; lines seen before are dropped, which takes away headers and menus. One file in a hundred
is held out. OUT gets

| file | |
|---|---|
| `tokenizer.json` | byte-level BPE of 8,192 tokens, learned on the training files |
| `train.u16.xz` | tokens of the training files, uint16, a 0 after each file |
| `heldout.u16` | tokens of the held-out files |
"""

import argparse
import gzip
import hashlib
import html
import lzma
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PACKAGES = [
    "apache2-doc",
    "bash-doc",
    "bind9-doc",
    "cmake-doc",
    "debian-faq",
    "debian-policy",
    "debian-reference-en",
    "developers-reference",
    "dict-devil",
    "dict-foldoc",
    "dict-gcide",
    "dict-jargon",
    "dict-wn",
    "erlang-doc",
    "fortunes",
    "gap-doc",
    "git-doc",
    "libreoffice-help-en-us",
    "lilypond-doc-html",
    "linux-doc-6.1",
    "manpages",
    "manpages-dev",
    "maxima-doc",
    "octave-doc",
    "perl-doc",
    "postfix-doc",
    "postgresql-doc-15",
    "python-django-doc",
    "python3.11-doc",
    "rust-doc",
    "sqlite3-doc",
    "tcl8.6-doc",
]
VOCABULARY = 8192
END = "<|end|>"  # token 0
SHARE = 0.12  # of the whole, at most, from one package
SEEN = 1 << 20  # a line of a file longer than this is no text
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lp": 1, "pb": 1, "lc": 2}]

TAGS = (
    (re.compile(r"<(script|style|head|nav|footer|svg)\b.*?</\1>", re.S | re.I), " "),
    (re.compile(r"</?(p|div|br|li|h\d|tr|dt|dd|pre|table|ul|ol|dl|section)\b[^>]*>", re.I), "\n"),
    (re.compile(r"<[^>]*>"), ""),
)
ROFF = (
    (re.compile(r"^['.]\\\".*$", re.M), ""),
    (re.compile(r"^\.(SH|SS|TP|PP|IP|B|I|BR|RB|IR|RI|BI|IB|P|HP)\b[ ]?", re.M), ""),
    (re.compile(r"^\..*$", re.M), ""),
    (re.compile(r"\\f[A-Z(]|\\&|\\c$", re.M), ""),
    (re.compile(r"\\(-|\(hy|\(em)"), "-"),
    (re.compile(r"\\[a-z(*|].?.?"), ""),
)


def text_of(path: Path) -> str:
    """Return the words of a file of documentation; none of what is no text."""
    name, data = path.name, path.read_bytes()
    if name.endswith((".gz", ".dz")):
        name, data = name[:-3], gzip.decompress(data)
    text = data.decode("utf-8", "ignore")  # an old dictionary has a few bytes that are not
    if name.endswith((".html", ".htm")):
        rules = TAGS
    elif re.search(r"\.[1-9]\w*$", name) and "/man/" in str(path):
        rules = ROFF
    elif name.endswith((".txt", ".rst", ".dict", ".pod", ".u8")) or "/fortunes/" in str(path):
        rules = ()
    else:
        return ""
    for pattern, instead in rules:
        text = pattern.sub(instead, text)
    return html.unescape(text) if rules is TAGS else text


def fresh_lines(text: str, seen: set[bytes]) -> str:
    """Return `text` without the lines of `seen`, blanks made one; remember its lines."""
    kept = []
    for raw in text.split("\n"):
        line = re.sub(r"[ \t\r\xa0]+", " ", raw).rstrip()
        if len(line) > 16:
            digest = hashlib.blake2b(line.strip().encode(), digest_size=8).digest()
            if digest in seen:
                continue
            seen.add(digest)
        kept.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def documents(root: Path, limit: int) -> Iterator[str]:
    """Yield texts of an unpacked package, files in random order, until `limit` bytes."""
    paths = sorted(x for x in root.rglob("*") if x.is_file() and not x.is_symlink())
    random.Random(0).shuffle(paths)
    seen: set[bytes] = set()
    for path in paths:
        text = fresh_lines(text_of(path), seen)
        for at in range(0, len(text), SEEN):  # dictionaries are one file
            part = text[at : at + SEEN]
            if len(part) > 200:
                limit -= len(part.encode())
                yield part
            if limit < 0:
                return


def unpacked(folder: Path, debs: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield each package's name and the folder that it is unpacked in."""
    if debs is None:
        debs = folder / "debs"
        debs.mkdir()
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=debs, check=True)
    for deb in sorted(debs.glob("*.deb")):
        root = folder / deb.name
        subprocess.run(["dpkg-deb", "-x", deb, root], check=True)
        yield deb.name.partition("_")[0], root


def learn(texts: list[str]) -> Tokenizer:
    """Return a tokenizer learned on a sample of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((x[:4000] for x in texts[:10_000]), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], most: int) -> np.ndarray:
    """Return the tokens of texts, a 0 after each, until there are `most`."""
    found, count = [], 0
    for at in range(0, len(texts), 64):
        for one in tokenizer.encode_batch_fast(texts[at : at + 64]):
            found.append(np.array([*one.ids, 0], np.uint16))
            count += len(found[-1])
        if count > most:
            break
    return np.concatenate(found)[:most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=120, help="of text")
    parser.add_argument("--packages", type=Path, help="a folder of .deb files [apt-get download]")
    parser.add_argument("--tokens", type=int, default=28_000_000, help="to train on, at most")
    given = parser.parse_args()
    train: list[str] = []
    heldout: list[str] = []
    limit = int(given.megabytes * 1e6 * SHARE)
    with tempfile.TemporaryDirectory() as temporary:
        for name, root in unpacked(Path(temporary), given.packages):
            texts = list(documents(root, limit))
            print(f"{name}: {sum(map(len, texts)) / 1e6:.1f} MB of {len(texts)} files", flush=True)
            for text in texts:
                chosen = hashlib.sha256(text.encode()).digest()[0] * 100 < 256
                (heldout if chosen else train).append(text)
    random.Random(0).shuffle(train)
    random.Random(0).shuffle(heldout)
    write(given.out, train, heldout, given.tokens)


def write(out: Path, train: list[str], heldout: list[str], most: int) -> None:
    """Learn the tokenizer and write what the training reads."""
    out.mkdir(parents=True, exist_ok=True)
    print(f"{sum(map(len, train)) / 1e6:.0f} MB to train on", flush=True)
    tokenizer = learn(train)
    tokenizer.save(str(out / "tokenizer.json"))
    tokens = encode(tokenizer, train, most)
    packed = lzma.compress(tokens.tobytes(), lzma.FORMAT_XZ, filters=FILTERS)
    (out / "train.u16.xz").write_bytes(packed)
    held = encode(tokenizer, heldout, 1_000_000)
    (out / "heldout.u16").write_bytes(held.tobytes())
    print(f"{len(tokens):,} tokens in {len(packed) / 1e6:.1f} MB; {len(held):,} held out")


if __name__ == "__main__":
    main()
