"""Names a wheel that holds compiled kernels (make wheel) after the systems on which they run."""

import platform
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

PREBUILT = Path(__file__).parent / "src" / "hasten" / "ops" / "prebuilt" / platform.machine()


class WithKernels(Distribution):
    """A distribution for one kind of processor if kernels were compiled for it, else for all."""

    def has_ext_modules(self) -> bool:
        return any(PREBUILT.glob("*.so"))


class Wheel(bdist_wheel):
    """A wheel whose kernels use no Python and need no newer system than manylinux_2_28 (ops/prebuild.py)."""

    def get_tag(self) -> tuple[str, str, str]:
        return super().get_tag() if self.root_is_pure else ("py3", "none", f"manylinux_2_28_{platform.machine()}")


setup(distclass=WithKernels, cmdclass={"bdist_wheel": Wheel})
