from __future__ import annotations

from collections.abc import Callable

import pytest

from dflash.models.target import Target
from tests.decode import parts


@pytest.fixture(scope="session")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    """A loaded target of each family, made once."""
    made: dict[str, Target] = {}

    def get(family: str) -> Target:
        if family not in made:
            made[family] = parts.make_target(parts.MODELS[family](), tmp_path_factory.mktemp(family))
        return made[family]

    return get
