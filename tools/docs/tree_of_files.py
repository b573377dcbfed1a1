"""Trees that tests make up."""

import contextlib
import pathlib
import tempfile


@contextlib.contextmanager
def tree_of(files):
    """The root of a folder with these texts, by path, for as long as it is looked at."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        yield root
