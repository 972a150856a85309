"""Runs all programs of this folder, each group in a process with its environment; prints `N passed, N failed`.

    python run.py [NAME...]              only cases whose names contain one of the texts
    python run.py --modules M,N [NAME...]  only the cases of these modules, in the environment as it is but for the trace

The toolkit's `set_env.sh` must have been sourced.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile

STRICT = {"ASCEND_EMU_CHECK": "strict"}
TRACE = {"ASCEND_EMU_TRACE": "{folder}/trace.jsonl"}
TRACED = STRICT | TRACE
# Environments, and the modules whose cases run in them. `{folder}` is one for files of the run.
GROUPS = [
    (STRICT, ["layouts", "masks", "paged", "latent", "extras", "quantised"]),
    (STRICT, ["indexer", "sparse", "block_sparse", "sparse_refusals", "nsa", "delta_rule"]),
    (STRICT, ["quant_indexer", "quant_sparse"]),
    (STRICT, ["scatter", "atb", "merging", "serving", "refusals"]),
    (STRICT, ["graphs", "family_graphs", "streams", "misuse", "around"]),
    (STRICT, ["ranks"]),
    (TRACED, ["operators", "releases", "fusion", "fusion_extras", "fusion_refusals", "dropout", "dot_product", "backward"]),
    (TRACED, ["prompt", "incre", "inference_refusals", "ring", "gather"]),
    (STRICT | {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, ["streams", "graphs", "family_graphs"]),
    (STRICT | {"ASCEND_EMU_SOC": "Ascend910_9391"}, ["paged", "latent"]),
    (STRICT | {"ASCEND_EMU_SOC": "Ascend950PR_9599"}, ["layouts", "paged", "latent", "scatter", "merging", "serving"]),
    (STRICT | {"ASCEND_EMU_SOC": "Ascend950PR_9599"}, ["indexer", "sparse", "block_sparse"]),
    (STRICT | {"ASCEND_EMU_SOC": "Ascend950PR_9599"}, ["quant_indexer", "quant_sparse"]),
    (TRACED | {"ASCEND_EMU_SOC": "Ascend950PR_9599"}, ["fusion", "dot_product", "ascend950", "gather", "convolution"]),
    (TRACED | {"ASCEND_EMU_SOC": "Ascend310P3"}, ["atlas310p"]),
]

# The lints that cases break on purpose, to see what the operator computes then.
LINTS = {
    "flash.atten_mask_packed",
    "flash.mode_without_mask",
    "flash.start_index_first",
    "flash.tokens_without_mask",
    "tokens.without_mask",
}


def forgotten(folder, known):
    """Files of a folder with cases that are in no group."""
    for file in sorted(os.listdir(folder)):
        module, extension = os.path.splitext(file)
        if extension == ".py" and module not in known:
            with open(os.path.join(folder, file), encoding="utf-8") as source:
                if any(line.startswith("@case") for line in source):
                    yield f"{file}: in no group"


def inside(modules, only):
    """The cases of some modules, in this process."""
    import harness
    import torch
    import torch_npu

    torch.npu.set_device(0)
    for module in modules:
        importlib.import_module(module)
    passed, failed = harness.run(modules, only)
    print("RESULT " + json.dumps({"passed": passed, "failed": failed, "calls": harness.calls}), flush=True)


def outside(groups, only, lints, every=False, findings="(?!)"):
    """Runs groups of cases, which may break some lints and lead to findings of a pattern.

    Where they are every case there is, each of the lints has to be broken.
    """
    with tempfile.TemporaryDirectory() as files:
        return report(groups, only, files, lints, every, re.compile(findings))


def report(groups, only, files, lints, every, allowed):
    passed, failed, calls, unbroken = 0, [], {}, set(lints)
    folder = os.path.dirname(os.path.abspath(__file__))
    for variables, modules in groups:
        shown = [f"{name}={value}" for name, value in variables.items()] + modules
        print(f"=== {' '.join(shown)}", flush=True)
        given = {name: value.format(folder=files) for name, value in variables.items()}
        command = [sys.executable, os.path.join(folder, "run.py"), "--inside", ",".join(modules), *only]
        process = subprocess.Popen(
            command, env=os.environ | given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        result, findings = None, 0
        for line in process.stdout:
            if line.startswith("RESULT "):
                result = json.loads(line.removeprefix("RESULT "))
                continue
            lint = re.match(r"ascend-emu: lint: \w+: ([\w.]+):", line)
            if lint and lint[1] in lints:
                unbroken.discard(lint[1])
                continue
            # The extension chooses the version of an operator, not the case.
            if lint and lint[1].endswith(".deprecated"):
                continue
            if allowed.match(line):
                continue
            findings += line.startswith("ascend-emu:")
            if not line.startswith("ok "):
                print(line, end="", flush=True)
        code = process.wait()
        if result is None:
            failed.append(f"{modules}: ended with {code} before its cases did")
            continue
        passed += result["passed"]
        failed += result["failed"]
        if code or findings:
            failed.append(f"{modules}: status {code}, {findings} findings of the emulation")
        for operator, count in result["calls"].items():
            calls[operator] = calls.get(operator, 0) + count
    if every:
        failed += [f"{lint}: no case breaks the lint" for lint in sorted(unbroken)]
    if not passed and not failed:
        failed.append(f"no case: none has a name with one of {only}")
    for name in failed:
        print(f"failed: {name}")
    for operator in sorted(calls):
        print(f"{calls[operator]:5} calls of {operator}")
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--inside"]:
        inside(arguments[1].split(","), arguments[2:])
    elif arguments[:1] == ["--modules"]:
        sys.exit(outside([(TRACE, arguments[1].split(","))], arguments[2:], LINTS))
    else:
        known = {module for _, modules in GROUPS for module in modules}
        for file in forgotten(os.path.dirname(os.path.abspath(__file__)), known):
            sys.exit(file)
        sys.exit(outside(GROUPS, arguments, LINTS, every=not arguments))
