"""What the guides' pages say: commands, what they print, and files to save.

    ```sh                     commands, to be typed in the folder of one's program
    ```sh checkout            commands, to be typed in a checkout of this project
    ```sh server=PORT         the same in another terminal; goes on while the next commands run, and somebody listens on PORT meanwhile
    ```text                   what the commands before it print on standard output, where ... is whatever it is: any text of a line, or any lines if it is alone
    ```LANGUAGE PATH          a file, to be saved under that name

No other fenced block is allowed on these pages: nothing on them goes unexamined.
"""

import dataclasses
import re

FENCE = re.compile(r"^```(.*)$")
FILES = ("c", "dockerfile", "yaml")


@dataclasses.dataclass
class Block:
    line: int  # of the page, where it begins
    language: str
    word: str  # what follows the language
    text: str
    prints: str | None = None  # for commands: what they print, if the page says so


def blocks(text):
    """The blocks of a page, in order; what commands print is with the commands. Raises ValueError for what is none of the above."""
    found, inside = [], None
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if inside is None and fence:
            language, _, word = fence[1].partition(" ")
            inside = Block(number, language, word, "")
        elif fence:
            found.append(inside)
            inside = None
        elif inside is not None:
            inside.text += line + "\n"
    if inside is not None:
        raise ValueError(f"line {inside.line}: the block has no end")

    together = []
    for block in found:
        where = f"line {block.line}"
        if block.language == "text" and not block.word:
            if not together or together[-1].language != "sh" or together[-1].prints is not None:
                raise ValueError(f"{where}: text that no command stands before")
            together[-1].prints = block.text
        elif block.language == "sh" and re.fullmatch(r"|checkout|server=\d+", block.word):
            together.append(block)
        elif block.language in FILES and re.fullmatch(r"[\w./-]+", block.word):
            together.append(block)
        else:
            raise ValueError(f"{where}: a block '{block.language} {block.word}'")
    return together


def lines_of(text):
    """Without what differs unseen: blanks at ends, and how many there are between words."""
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def agrees(expected, actual):
    """Whether that is what the page says."""
    pattern = ""
    for line in lines_of(expected):
        pattern += r"(?:.*\n)*?" if line == "..." else ".*?".join(map(re.escape, line.split("..."))) + r"\n"
    return re.fullmatch(pattern, "".join(line + "\n" for line in lines_of(actual))) is not None
