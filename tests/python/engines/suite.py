"""Runs the cases of this folder in strict, each engine in a process of its own; prints `N passed, N failed`.

    python suite.py [NAME...]                only cases whose names contain one of the texts
    python suite.py --modules M,N [NAME...]  only the cases of these modules

ENGINES_SOURCES names the folder that has the engines' sources in `vllm`, `vllm_ascend` and `sglang`, as
`.ci/engines` unpacks them. The toolkit's `set_env.sh` must have been sourced.
"""

import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(FOLDER))
import run  # noqa: E402

GROUPS = [
    (("vllm", "vllm_ascend"), ["vllm_grouped", "vllm_grouped_graphs"]),
    (("vllm", "vllm_ascend"), ["vllm_latent", "vllm_latent_graphs"]),
    (("sglang",), ["sglang_grouped", "sglang_latent"]),
]
# What the engines do that the release takes: SGLang queries with parts of a tensor, and with sinks for a window of -1
# without a mask; in graphs vLLM-Ascend hands on a place for log-sums that it does not ask for.
LINTS = {"tensor.strided", "tokens.without_mask", "softmax_lse.ignored"}
# vLLM-Ascend copies a mask from memory that is not pinned without waiting; the copy waits by itself.
FINDINGS = (
    r"ascend-emu: asynchronous copy with pageable host memory: aclrtMemcpyAsync: "
    r"|ascend-emu: \d+ findings? in this process: asynchronous copy with pageable host memory \(\d+\)$"
)


def environment(engines):
    """Strict checks, the engines' sources, of plugins the product's alone, and no look at a hub of models."""
    paths = []
    for engine in engines:
        path = os.path.join(os.environ["ENGINES_SOURCES"], engine)
        if not os.path.isdir(path):
            sys.exit(f"ENGINES_SOURCES: there is no {path}")
        paths.append(path)
    python_path = os.pathsep.join(paths)
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return run.STRICT | quiet | {"PYTHONPATH": python_path, "VLLM_PLUGINS": "ascend"}


if __name__ == "__main__":
    if "ENGINES_SOURCES" not in os.environ:
        sys.exit("ENGINES_SOURCES is not set: it names the folder of the engines' sources")
    known = {name for _, modules in GROUPS for name in modules}
    for file in run.forgotten(FOLDER, known):
        sys.exit(file)
    arguments, wanted = sys.argv[1:], known
    if arguments[:1] == ["--modules"]:
        wanted, arguments = set(arguments[1].split(",")), arguments[2:]
        if not wanted <= known:
            sys.exit(f"no modules: {', '.join(sorted(wanted - known))}")
    groups = []
    for engines, modules in GROUPS:
        chosen = [f"engines.{name}" for name in modules if name in wanted]
        if chosen:
            groups.append((environment(engines), chosen))
    sys.exit(run.outside(groups, arguments, LINTS, wanted == known and not arguments, FINDINGS))
