"""Whether the compiler that Inductor calls works on this machine, and which backend to use where it doesn't."""

from __future__ import annotations

import functools
import subprocess
import sysconfig
import tempfile
from pathlib import Path

_PROBE = "#include <Python.h>\n#include <omp.h>\n#include <vector>\nint ready() { return omp_get_max_threads(); }\n"


@functools.cache
def find_missing_toolchain() -> str | None:
    """Return why Inductor can't build kernels here, or None. Builds one tiny kernel to find out.

    Kernels for GPUs need the same: Triton compiles a small C++ launcher against Python's headers for each.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        compiler = get_cpp_compiler()
    except Exception as error:  # Inductor's own error type differs between releases; its text is what matters
        return str(error).splitlines()[0]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(_PROBE)
        command = [compiler, "-shared", "-fPIC", "-fopenmp", f"-I{sysconfig.get_paths()['include']}"]
        try:
            done = subprocess.run(
                [*command, str(source), "-o", str(source.with_suffix(".so"))], capture_output=True, text=True
            )
        except OSError as error:
            return f"{compiler} does not run: {error}"
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            return f"{compiler} failed: {lines[0] if lines else f'exit code {done.returncode}'}"
    return None


def choose_backend(requested: str) -> tuple[str, str | None]:
    """Return the backend to use and, where it isn't the requested one, why."""
    if requested != "inductor":
        return requested, None
    missing = find_missing_toolchain()
    return ("aot_eager", missing) if missing else (requested, None)
