"""Build the libraries that torch_npu links, for a machine without CANN.

    python -m tests.ascend.sim.generate SITE_PACKAGES OUT_DIR

Reads the undefined symbols of every library in the torch_npu wheel, takes away what torch, Python and the C and C++
runtimes define, and links one libascendcl.so: our own runtime.cpp, hccl.cpp and operators.cpp, and for the rest a function
that returns 0. The other libraries that the wheel asks for are empty and depend on that one. libopapi.so holds a function
that does nothing for each aclnn name, so that torch_npu's own operator code runs, with its checks and its output shapes,
up to the kernel. Only names and C headers are read from the wheel; nothing of it is copied.
"""

import argparse
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("runtime", "hccl", "operators")
SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1")
MAIN = "libascendcl.so"
BY_NAME = {"libnnopbase.so", "libmsprofiler.so"}
"""Libraries that torch_npu opens by name, beside those it links."""
OPENED = re.compile(
    rb"\x00(acl(?:rt|mdl|prof|sys|op|Prof)[A-Z][A-Za-z0-9]*"
    rb"|aclSetCompileopt|aclGenGraphAndDumpForOp|aclCreateGraphDumpOpt|aclDestroyGraphDumpOpt|aclStressDetect"
    rb"|aclGetCannAttribute(?:List)?)(?=\x00)"
)
"""Names of the runtime that torch_npu looks up while it runs; they stand in its library as text."""
OPERATORS = re.compile(rb"\x00(aclnn[A-Za-z0-9]+|acl(?:Create|Destroy)[A-Z][A-Za-z]*|aclGetViewShape)(?=\x00)")


def main() -> int:
    """Build; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site_packages", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    print(build(given.site_packages.resolve(), given.out.resolve()))
    return 0


def build(site_packages: Path, out: Path) -> str:
    """Write the libraries into `out`; returns a line on what they hold.

    Raises FileNotFoundError without the wheel, CalledProcessError when a compiler fails.
    """
    wheel = site_packages / "torch_npu"
    library = wheel / "lib" / "libtorch_npu.so"
    if not library.is_file():
        raise FileNotFoundError(f"{library} is not there: install torch_npu into this environment")
    # torch_npu looks for these two folders below ASCEND_HOME_PATH.
    for folder in ("runtime", "compiler"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    include = wheel / "include"
    objects = []
    for part in PARTS:
        objects.append(out / f"{part}.o")
        compile_part(HERE / f"{part}.cpp", objects[-1], (include, include / "third_party" / "acl" / "inc"))
    ours = {name for path in objects for name in symbols(path, "--defined-only")}
    missing, libraries = asked_for(wheel, site_packages)
    text = library.read_bytes()
    missing |= {match.decode() for match in OPENED.findall(text)}
    link(out, MAIN, sorted(missing - ours), objects)
    for name in sorted((libraries | BY_NAME) - {MAIN}):
        link(out, name, [])
    operators = {match.decode() for match in OPERATORS.findall(text)} - missing - ours
    link(out, "libopapi.so", sorted(operators))
    return (
        f"{len(missing)} names asked for, {len(missing & ours)} of them by a part of ours; "
        f"{len(operators)} operators that do nothing; {len(libraries)} libraries"
    )


def compile_part(source: Path, target: Path, include: Iterable[Path]) -> None:
    """One of our C++ files. A warning is an error: most are a signature that has changed."""
    flags = [f"-I{path}" for path in include]
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags, "-c", source, "-o", target],
        check=True,
    )


def asked_for(wheel: Path, site_packages: Path) -> tuple[set[str], set[str]]:
    """Symbols that the wheel's libraries need and nobody gives, and the libraries they would come from."""
    modules = sorted(wheel.glob("**/*.so*"))
    torch = sorted((site_packages / "torch" / "lib").glob("*.so*"))
    python = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    given = {
        name for path in (*modules, *torch, *python.glob("libpython3*.so*")) for name in symbols(path, "--defined-only")
    }
    given |= set(symbols(Path(sys.executable).resolve(), "--defined-only"))
    for name in SYSTEM:
        path = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        given |= set(symbols(Path(path.strip()), "--defined-only"))
    missing: set[str] = set()
    libraries: set[str] = set()
    for path in modules:
        missing |= {name for name, kind in symbols(path, "--undefined-only").items() if kind == "U"}
        dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        libraries |= set(re.findall(r"NEEDED.*\[(.+?)\]", dynamic))
    missing = {name for name in missing - given if not re.match(r"_?Py|__tls", name)}
    local = {path.name for path in (*modules, *torch)} | set(SYSTEM)
    return missing, {name for name in libraries - local if not name.startswith("ld-linux")}


def symbols(path: Path, which: str) -> dict[str, str]:
    """Dynamic symbols of a library (all symbols of an object file) -> their kind."""
    dynamic = [] if path.suffix == ".o" else ["-D"]
    output = subprocess.run(["nm", *dynamic, which, path], capture_output=True, text=True, check=False).stdout
    fields = [line.split() for line in output.splitlines()]
    return {parts[-1].split("@")[0]: parts[-2] for parts in fields if len(parts) >= 2}


def link(out: Path, name: str, empty_functions: Iterable[str], objects: Iterable[Path] = ()) -> None:
    """A library of functions that return 0 (a handle, where one is made) and the objects."""
    lines = ["static char handle[64];"]
    for number, symbol in enumerate(empty_functions):
        value = "(long)handle" if symbol.startswith("aclCreate") else "0"
        # An assembler name, since most of the names are C++ ones.
        lines.append(f'long f{number}(void) __asm__("{symbol}"); long f{number}(void) {{ return {value}; }}')
    source = out / f"{name.split('.')[0]}.c"
    source.write_text("\n".join(lines) + "\n")
    depends = [] if name == MAIN else ["-Wl,--no-as-needed", f"-L{out}", "-lascendcl"]
    command = ["gcc", "-w", "-shared", "-fPIC", "-o", out / name, source, *objects, f"-Wl,-soname,{name}", *depends]
    subprocess.run([*command, "-lstdc++"], check=True)


if __name__ == "__main__":
    sys.exit(main())
