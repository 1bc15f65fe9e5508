"""On the path of a stand-in that computes: torch's kernels for CPUs are put in place with torch."""

import importlib.abc
import importlib.machinery
import sys


class _Torch(importlib.abc.MetaPathFinder):
    """Stays until torch has run: some libraries look for torch long before they import it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_install(module):
                run(module)
                sys.meta_path.remove(self)
                import stand_in_kernels

                stand_in_kernels.install()

            spec.loader.exec_module = run_and_install
        return spec


sys.meta_path.insert(0, _Torch())
