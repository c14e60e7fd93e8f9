"""An older path: ``cactus_theory.integrations.vllm`` and all in it are ``cactus_theory.vllm``."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OLD, NEW = f"{__name__}.vllm", "cactus_theory.vllm"


class _OlderPath(MetaPathFinder, Loader):
    """Import a module of ``cactus_theory.vllm`` by its older name: the same object, not a copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if f"{fullname}.".startswith(f"{OLD}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(NEW + spec.name.removeprefix(OLD))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which has run, its spec back: this import has replaced it."""
        module.__spec__ = module.__dict__["__spec__"].loader_state


sys.meta_path.insert(0, _OlderPath())
