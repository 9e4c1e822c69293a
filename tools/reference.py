"""The reference pages of the site: every public function, from its signature and its docstring.

A docstring is paragraphs, lists of arguments, and examples. A list is a line that ends in a colon with indented entries
below it (`name: text`, further lines indented deeper); an example begins with `>>>`.
"""

import enum
import inspect
import re
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import wrappers
from wrappers.own.registry import FAMILY_OF, FUNCTIONS

NAMES = {page: tuple(row.name for row in FUNCTIONS if row.page == page) for page in FAMILY_OF}
GROUPS = {  # page -> (title, first sentence, names)
    "prefill": (
        "Prefill functions",
        "Attention of many query tokens, in requests of any lengths. The guide is [Prefill](../docs/prefill.md).",
        (
            *NAMES["prefill"], "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper",
            "BatchAttentionWithAttentionSinkWrapper", "BatchPrefillWithCausalBidirectionalRangesWrapper",
        ),
    ),
    "decode": (
        "Decode functions",
        "Attention of few query tokens per request. The guide is [Decode](../docs/decode.md).",
        (
            *NAMES["decode"], "BatchDecodeWithPagedKVCacheWrapper", "fast_decode_plan", "BatchMLAPagedAttentionWrapper",
            "MLAPlanMetadata",
        ),
    ),
    "flash-attention": (
        "FlashAttention's functions",
        "The names and arguments of FlashAttention, over the same kernels. The guide is "
        "[Coming from FlashInfer or FlashAttention](../docs/drop-in.md#flashattentions-functions).",
        NAMES["flash-attention"],
    ),
    "top-k": (
        "Top-k functions",
        "Exact selection of the largest scores of each row. The guide is [Top-k](../docs/top-k.md).",
        (*NAMES["top-k"], "TopKTieBreak"),
    ),
    "sparse": (
        "The indexer of sparse attention",
        "How well each key suits a query token. The guide is [Sparse attention](../docs/sparse.md).",
        NAMES["sparse"],
    ),
    "caches": (
        "Caches, NVFP4, merging, masks",
        "Functions beside attention. The guide is [Caches](../docs/caches.md).",
        (
            *NAMES["caches"], "KVCacheTarget", "PageLists", "BlockTable", "RMSNorm", "RotaryEmbedding", "QueryOutput",
            "LatentCache", "LatentNorm", "LatentQuery", "IndexerRows", "LatentOutputs", "FP4Tensor",
        ),
    ),
    "explain": (
        "Which kernel runs, and calls that are bound",
        "The kernel that would serve a call ([Bundles](../docs/bundles.md#which-kernel-serves-a-call)), and calls that "
        "keep their launch ([Graphs](../docs/graphs.md#bind-a-call)).",
        ("explain", "Explanation", "bind"),
    ),
}  # fmt: skip
PAGE_OF = {name: page for page, (_, _, names) in GROUPS.items() for name in names}
STARTS = re.compile(r"(Args|Returns?|Raises?|Hints?:|Refused|Accepted|Can be|[A-Z]\w+Error)\b")  # of a new paragraph
CODE = re.compile(r"(`[^`]*`)")
IDENTIFIER = re.compile(r"(?<!\")\b[a-z][a-z0-9]*_\w+(?:\[[^\]]*\](?::\w+\[[^\]]*\])?)?")
SPECIAL = re.compile(r"([*<\[\]|])")


def prose(text: str) -> str:
    """Return a line of a docstring as Markdown: identifiers as code, special characters escaped."""

    def outside(part: str) -> str:
        pieces, at = [], 0
        for found in IDENTIFIER.finditer(part):
            pieces += [SPECIAL.sub(r"\\\1", part[at : found.start()]), f"`{found[0]}`"]
            at = found.end()
        return "".join([*pieces, SPECIAL.sub(r"\\\1", part[at:])])

    return "".join(part if i % 2 else outside(part) for i, part in enumerate(CODE.split(text)))


def described(text: str, names: frozenset[str]) -> str:
    """Return `name, name: text` with the names set off; other text as prose."""
    head, colon, rest = text.partition(": ")
    words = re.findall(r"\w+", head)
    if not colon or not words or words[0] not in names:
        return prose(text)
    head = re.sub(r"\w+", lambda m: f"`{m[0]}`" if m[0] in names else m[0], head)
    return f"**{head}**: {prose(rest)}"


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def entries(lines: list[str], names: frozenset[str]) -> Iterator[str]:
    """Yield the items of an indented list; a line that is indented deeper continues the item before it."""
    least, item = min(map(indent, lines)), ""
    for line in lines:
        if indent(line) == least and item:
            yield f"- {described(item, names)}"
            item = ""
        item = f"{item} {line.strip()}".strip()
    yield f"- {described(item, names)}"


def markdown(doc: str, names: frozenset[str] = frozenset()) -> str:
    """Return a docstring as Markdown. names: the arguments of the function."""
    out: list[str] = []
    lines = [*doc.splitlines(), ""]
    while lines:
        line = lines.pop(0)
        if not line.strip():
            out.append("")
        elif line.startswith(">>>"):
            example = [line]
            while lines and lines[0].strip():
                example.append(lines.pop(0))
            out += ["", "```pycon", *example, "```", ""]
        elif lines and indent(lines[0]) > indent(line):
            block = []
            while lines and indent(lines[0]) > indent(line):
                block.append(lines.pop(0))
            text = line.rstrip(":") + ":"
            if not line.rstrip().endswith(":"):  # the first entry of the list stands in its head
                head, _, first = line.partition(": ")
                text, block = f"{head}:", [" " * indent(block[0]) + first, *(f"  {more}" for more in block)]
            more = bool(out and out[-1]) and not STARTS.match(line)  # the head has more than one line
            out += [*([] if more else [""]), prose(text), "", *entries(block, names), ""]
        elif out and out[-1] and not STARTS.match(line):
            out.append(prose(line))
        else:
            out += ["", described(line, names)]
    text = re.sub(r"^Args\b", "Arguments", "\n".join(out), flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return f'"{value}"' if isinstance(value, str) else getattr(value, "__name__", repr(value))


def short(annotation: str) -> str:
    return re.sub(r"\b(?:wrappers(?:\.\w+)*|collections\.abc|typing)\.", "", annotation)


def argument(p: inspect.Parameter) -> str:
    text = short(str(p.replace(default=p.empty)))
    return text if p.default is p.empty else f"{text} = {default(p.default)}"


def signature(name: str, function: Any, method: bool = False) -> str:
    """Return `name(...)` with one argument per line where one line is too short."""
    found = inspect.signature(function)
    given = list(found.parameters.values())[1 if method else 0 :]
    parts, star = [], False
    for p in given:
        if p.kind is p.KEYWORD_ONLY and not star and not any(q.kind is q.VAR_POSITIONAL for q in given):
            parts.append("*")
        star = star or p.kind is p.KEYWORD_ONLY
        parts.append(argument(p))
    kind = found.return_annotation
    result = "" if kind in (found.empty, Any, None) else f" -> {short(inspect.formatannotation(kind))}"
    line = f"{name}({', '.join(parts)}){result}"
    text = line if len(line) <= 88 else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"
    return f"```python\n{text}\n```"


def names_of(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods of a class and of the bases that this package has, in the order of their definition."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("wrappers"):
            for name, function in vars(base).items():
                if isinstance(function, FunctionType) and not name.startswith("_") and name not in seen:
                    seen.add(name)
                    yield name, getattr(cls, name)


def section(name: str) -> str:
    """Return the part of a page that describes one public name."""
    thing = getattr(wrappers, name)
    head, doc = f"## {name} {{ #{name} }}", inspect.getdoc(thing) or ""
    if not isinstance(thing, type):
        return "\n\n".join([head, signature(name, thing), markdown(doc, names_of(thing))])
    if issubclass(thing, enum.Enum):
        members = "\n".join(f"- `{name}.{member.name}` = {member.value}" for member in thing)
        return "\n\n".join([head, markdown(doc), members])
    parts = [head, signature(name, thing), markdown(doc, names_of(thing))]
    shown: dict[Any, str] = {}
    if issubclass(thing, tuple) or "__dataclass_fields__" in vars(thing):
        return "\n\n".join(parts)
    for method, function in methods(thing):
        title = f"### {method} {{ #{name}.{method} }}"
        if function in shown:
            parts += [title, f"Another name of `{shown[function]}`."]
            continue
        shown[function] = method
        text = markdown(inspect.getdoc(function) or "", names_of(function))
        parts += [title, signature(method, function, method=True), text]
    return "\n\n".join(parts)


def pages() -> dict[str, str]:
    """Return all reference pages: name of the file without its suffix -> Markdown."""
    return {
        page: "\n\n".join([f"# {title}", first, *(section(name) for name in names)]) + "\n"
        for page, (title, first, names) in GROUPS.items()
    }


def linked(text: str, to: str) -> str:
    """Turn the mentions of public functions and of their methods on a page into links to the reference. to: its folder,
    from that page."""
    parts = re.split(r"(^```.*?^```|^#.*?$|\[[^\]]*\]\([^)]*\)|<!--.*?-->)", text, flags=re.M | re.S)

    def link(match: re.Match[str]) -> str:
        page = PAGE_OF.get(match[2])
        if page and match[3] and not hasattr(getattr(wrappers, match[2]), match[3]):
            page = None  # the name of a file or of an op
        return f"[`{match[1]}`]({to}/{page}.md#{match[1]})" if page else match[0]

    return "".join(part if i % 2 else re.sub(r"`((\w+)(?:\.([a-z]\w*))?)`", link, part) for i, part in enumerate(parts))
