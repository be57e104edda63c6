"""Small wheels for pip."""

import zipfile
from pathlib import Path

DATA = b"some weights " * 1000


def make_wheel(
    folder: Path, name: str = "tinymodel", members: dict[str, bytes] | None = None
) -> Path:
    """Write a valid wheel with the given files."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/model.gguf": DATA,
        **(members or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(file, data)
    return path
