"""Units: the modules whose weights move together when a model runs without a compiler.

A unit is a block, or a large module outside all blocks. Where the user chooses modules, these are the units. Otherwise blocks are

    declared    by a class, as attributes that hold them (`_layerwise_offload_blocks_attrs`) or as class names of the blocks
                themselves (`_repeated_blocks`): all below that class is taken as declared
    discovered  elsewhere: members of a ModuleList, ModuleDict or Sequential that holds two or more of one class with weights

The outermost wins, and a container without a forward stands for its members. What is left, small or called by nobody, stays
resident. The compiled path finds its blocks in the graph, and takes from here what is declared (`declared_paths`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from fxoffload.accepted import nearest
from fxoffload.config import OffloadConfig
from fxoffload.select import chosen_modules, nbytes_below, own_tensors, tensors_below
from fxoffload.sizes import MIB

BLOCKS_ATTRS = "_layerwise_offload_blocks_attrs"
REPEATED_BLOCKS = "_repeated_blocks"
LARGE_NBYTES = MIB
"""A module outside blocks with so many bytes of weights is a unit of its own."""
_PARTS = 3
_PIECES = 12
_PIECES_OF_ROOM = 8
_LEAST_PIECE_NBYTES = 4 * MIB
_LARGEST_PIECE_NBYTES = 160 * MIB
"""Holds the attention of a large diffusion transformer, or one of its MLPs: copying it takes tens of times as long as the hooks
around it. Smaller ones gain nothing."""
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
_READS_ITS_CHILDREN = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
"""They use the weights of modules below them without calling these, so they are not split."""

Module = torch.nn.Module
Named = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A module, and every tensor below it with its qualified name. A tied weight belongs to each unit that has it."""

    name: str
    module: Module
    tensors: tuple[Named, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Units in the order of definition, none inside another. `rest` is what modules outside all units have: it stays resident.

    A weight that is tied between a unit and a module outside stands in both.
    """

    units: tuple[Unit, ...]
    rest: tuple[Named, ...]

    def are_same(self, other: Units) -> bool:
        """Whether these are the same modules with the same tensors, whatever their names."""
        mine, others = ([id(unit.module) for unit in units.units] for units in (self, other))
        return mine == others and _tensor_ids(self) == _tensor_ids(other)

    def __str__(self) -> str:
        from fxoffload.show import table

        rows = [(unit.name or '""', _nbytes(unit.tensors), len(unit.tensors)) for unit in self.units]
        head = f"units  {len(self.units)} units  {_nbytes(self.rest)} bytes in {len(self.rest)} tensors outside"
        return f"{head}\n{table(('unit', 'bytes', 'tensors'), rows)}"


def find_units(root: Module, config: OffloadConfig, *, limit_nbytes: int | None = None) -> Units:
    """The units of a model. A block with more than `limit_nbytes` of weights is split into the modules that have them.

    Raises AttributeError for a name or a declared attribute that is not there, TypeError for one that holds no modules,
    ConfigError when nothing with weights is chosen.
    """
    chosen = chosen_modules(config, root)
    heads = _by_id(block_modules(root) if chosen is None else _expand(chosen))
    if limit_nbytes is not None:
        heads = _by_id(part for module in heads.values() for part in _split(module, limit_nbytes))
    if chosen is None:
        within = _inside(heads.values())
        leaves = (m for _, m in _outside(root, heads) if _is_leaf(m) and id(m) not in within)
        heads = {**heads, **_by_id(leaf for leaf in leaves if nbytes_below(leaf) >= LARGE_NBYTES)}
    within = _inside(heads.values())
    heads = {key: module for key, module in heads.items() if key not in within and nbytes_below(module)}
    units = [Unit(name, m, tuple(tensors_below(m, name))) for name, m in root.named_modules() if id(m) in heads]
    return Units(tuple(units), tuple(_rest(root, heads)))


def split_limit(root: Module, config: OffloadConfig, budget_nbytes: int) -> int:
    """The most bytes of a block that is not split.

        all fit beside what stays resident    that much: none is split
        a setting counts buckets              that much: only what does not fit alone is split
        one on its way and none that stays    a third of the room: of whatever size, they count the same
        else                                  a piece, or a third of the room: one that runs and two on their way

    with piece = the least of weights / 12, room / 8 and 160 MiB, and no less than 4 MiB; or `max_bucket_bytes`. An eighth,
    because activations, of which nothing is known yet, may take most of the room. Nothing stays in the memory of what runs and
    of what is on its way, and only whole units are of use there: simulated with blocks of 648 MiB, a step takes 4 to 8% longer
    than its bound at most budgets, and 45% where two do not fit beside the activations; with pieces 1 to 2%. Settings that count
    buckets count blocks, however few fit; with `max_bucket_bytes` beside them, pieces of so many bytes.
    """
    units = find_units(root, config)
    spare = max(budget_nbytes - _nbytes(units.rest), 0)
    streamed = sum(_nbytes(unit.tensors) for unit in units.units)
    if streamed <= spare:
        return spare
    if config.max_bucket_bytes != "auto":
        return min(spare // _PARTS, config.max_bucket_bytes)
    if (config.transfer_buckets, config.persistent_buckets) == (1, 0):
        return spare // _PARTS
    if config.prefetch_limit or (config.transfer_buckets, config.persistent_buckets, config.persistent_bins) != (None,) * 3:
        return spare
    piece = max(_LEAST_PIECE_NBYTES, min(_LARGEST_PIECE_NBYTES, streamed // _PIECES, spare // _PIECES_OF_ROOM))
    return min(spare // _PARTS, piece)


def block_modules(root: Module) -> list[Module]:
    """Blocks of a model: declared ones, and discovered ones where nothing is declared. Some may lie inside others."""
    declared = _declared(root)
    inside = _inside(declared)
    found: list[Module] = [module for modules in declared.values() for module in modules]
    for module in root.modules():
        if module not in declared and id(module) not in inside:
            found += _repeated_members(module)
    return list(_expand(found))


def block_names(root: Module) -> tuple[str, ...]:
    """Names of the blocks that have weights, the outermost of each, in the order of definition."""
    blocks = _by_id(block for block in block_modules(root) if nbytes_below(block))
    within = _inside(blocks.values())
    return tuple(name for name, module in root.named_modules() if id(module) in blocks and id(module) not in within)


def declared_paths(root: Module) -> frozenset[str]:
    """Dotted paths of the blocks that classes declare, under all of their names; none where nothing is declared.

    Raises AttributeError for a declared attribute that is not there, TypeError for one that holds no modules.
    """
    declared = _declared(root)
    if not declared:
        return frozenset()
    blocks = _by_id(_expand(module for modules in declared.values() for module in modules))
    return frozenset(path for path, module in _all_paths(root, "", ()) if id(module) in blocks)


def _all_paths(module: Module, path: str, above: tuple[Module, ...]) -> Iterator[tuple[str, Module]]:
    """Every path to every module, but those that come back to a module above: a block may know its model."""
    yield path, module
    children: dict[str, Module | None] = vars(module)["_modules"]
    for name, child in children.items():
        if child is not None and child is not module and child not in above:
            yield from _all_paths(child, f"{path}.{name}" if path else name, (*above, module))


def _tensor_ids(units: Units) -> list[set[int]]:
    return [{id(t) for _, t in tensors} for tensors in (*(unit.tensors for unit in units.units), units.rest)]


# -- declarations ------------------------------------------------------------------------------------------------------


def _declared(root: Module) -> dict[Module, list[Module]]:
    """For every module whose class declares blocks: these blocks."""
    found: dict[Module, list[Module]] = {}
    for module in root.modules():
        attributes = getattr(type(module), BLOCKS_ATTRS, None)
        names = getattr(type(module), REPEATED_BLOCKS, None)
        if attributes:
            paths = [attributes] if isinstance(attributes, str) else list(attributes)
            found[module] = [block for path in paths for block in _members_at(module, path)]
        elif names:
            repeated = [child for child in module.modules() if type(child).__name__ in names and child is not module]
            if repeated:
                found[module] = repeated
    return found


def _members_at(owner: Module, path: str) -> list[Module]:
    """The modules in the container at a dotted path of attributes."""
    where, value = f"units: {BLOCKS_ATTRS}", cast("Any", owner)
    for step in path.split("."):
        parent = value
        value = getattr(parent, step, None)
        if value is None:
            known = [name for name, _ in parent.named_children()] if isinstance(parent, Module) else []
            hint = nearest(step, known) if known else f"it ends before {step!r}"
            raise AttributeError(f"{where}: {type(owner).__name__} has no attribute {path!r}; {hint}")
    members = _iterated(value)
    if members is None:
        raise TypeError(
            f"{where}: {path!r} of {type(owner).__name__} is of type {type(value).__name__}; "
            "name attributes that hold several modules, such as a ModuleList"
        )
    return members


def _iterated(value: Any) -> list[Module] | None:
    """The modules that a container holds, or None for what is none."""
    if isinstance(value, (torch.nn.ModuleDict, Mapping)):
        value = cast("Mapping[str, Any]", value).values()
    try:
        members = list(value)
    except TypeError:
        return None
    return members if all(isinstance(member, Module) for member in members) else None


# -- the tree ----------------------------------------------------------------------------------------------------------


def _repeated_members(container: Module) -> list[Module]:
    """Those members of a container that are two or more of one class and have weights."""
    if not isinstance(container, _CONTAINERS):
        return []
    members = [member for member in container.children() if nbytes_below(member)]
    counts = Counter(map(type, members))
    return [member for member in members if counts[type(member)] > 1]


def _expand(modules: Iterable[Module]) -> Iterator[Module]:
    """The modules, with the members of those that are no more than containers in their place."""
    for module in modules:
        if _has_forward(module):
            yield module
        else:
            yield from _expand(module.children())


def _split(module: Module, limit_nbytes: int) -> Iterator[Module]:
    """The module, or, if it has more weights than that, the largest modules below it that have no more, and leaves.

    A container never stands for its members, which somebody may call one by one. Nor is a module taken apart that has most of its
    weights itself: they would stay resident.
    """
    nbytes = nbytes_below(module)
    if nbytes <= limit_nbytes or _is_leaf(module) or 2 * _nbytes(own_tensors(module)) > nbytes:
        yield module
    else:
        for child in _callable_children(module):
            yield from _split(child, limit_nbytes)


def _callable_children(module: Module) -> Iterator[Module]:
    for child in module.children():
        if isinstance(child, _CONTAINERS) or not _has_forward(child):
            yield from _callable_children(child)
        else:
            yield child


def _is_leaf(module: Module) -> bool:
    return isinstance(module, _READS_ITS_CHILDREN) or next(module.children(), None) is None


def _has_forward(module: Module) -> bool:
    """Whether the module can be called: its class has a forward, or someone gave it one."""
    return type(module).forward is not Module.forward or "forward" in vars(module)


def _inside(modules: Iterable[Module]) -> set[int]:
    """`id`s of all that lies below one of these modules."""
    return {id(child) for module in modules for child in module.modules() if child is not module}


def _outside(root: Module, heads: Collection[int]) -> Iterator[tuple[str, Module]]:
    """Modules that can be reached from the root without passing through one of the heads, with their paths."""
    stack, seen = [("", root)], {id(root)}
    while stack:
        path, module = stack.pop()
        if id(module) in heads:
            continue
        yield path, module
        children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
        fresh = [(name, child) for name, child in children if id(child) not in seen]
        seen.update(id(child) for _, child in fresh)
        stack += reversed(fresh)


def _rest(root: Module, heads: Collection[int]) -> Iterator[Named]:
    seen: set[int] = set()
    for path, module in _outside(root, heads):
        for name, tensor in own_tensors(module, path):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def _by_id(modules: Iterable[Module]) -> dict[int, Module]:
    return {id(module): module for module in modules}


def _nbytes(tensors: Iterable[Named]) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
