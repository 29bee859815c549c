"""Rooms, floors and arrows of a package: `python -m tests.rooms bench`.

A room is a direct child of the package, a folder or a file. An arrow runs from one room to another when a
module in the first imports one in the second, lazily or for types too. The floor of a room is one above the
highest that it imports."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import grimp


@dataclass(frozen=True)
class House:
    """Attributes: `imports` rooms that each room imports; `floors` of each room, empty where imports run in a
    circle."""

    imports: dict[str, set[str]]
    floors: dict[str, int]

    @property
    def arrows(self) -> int:
        return sum(map(len, self.imports.values()))


def draw(package: str) -> House:
    """The rooms of a package that can be imported."""
    graph = grimp.build_graph(package, cache_dir=None)
    rooms = graph.find_children(package)
    for room in rooms:
        graph.squash_module(room)
    imports = {
        room: {one for one in graph.find_modules_directly_imported_by(room) if one in rooms} for room in rooms
    }
    floors: dict[str, int] = {}
    left = dict(imports)
    while ready := [room for room, needed in left.items() if needed <= floors.keys()]:
        for room in ready:
            floors[room] = 1 + max((floors[one] for one in left.pop(room)), default=0)
    return House(imports, {} if left else floors)


def main(package: str) -> None:
    house = draw(package)
    for room in sorted(house.imports, key=lambda one: (house.floors.get(one, 0), one)):
        names = " ".join(sorted(one.removeprefix(f"{package}.") for one in house.imports[room]))
        print(f"{house.floors.get(room, '?'):>2}  {room.removeprefix(f'{package}.'):<18}{names}")
    print(
        f"{package}: {len(house.imports)} rooms, {max(house.floors.values(), default=0)} floors, "
        f"{house.arrows} arrows"
    )


if __name__ == "__main__":
    main(sys.argv[1])
