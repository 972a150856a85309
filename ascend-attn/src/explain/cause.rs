//! Failures that no rule stands behind: the call may be right, and something else is missing or broken.

/// A kind of failure outside of the operators' contracts.
#[derive(Debug)]
pub(super) struct Cause {
    /// What a text says that speaks of it.
    signs: &'static [&'static str],
    /// What failed.
    pub(super) name: &'static str,
    /// What to do.
    pub(super) advice: &'static str,
    /// Whether no rule can stand behind the failure; otherwise the text may name a refused call as well.
    pub(super) is_final: bool,
    /// The conditions, by the last part of a rule's name, that a call breaks where this is its own fault.
    pub(super) conditions: &'static [&'static str],
}

/// The kinds, those that exclude others first.
const CAUSES: [Cause; 9] = [
    Cause {
        signs: &["out of memory", "207001", "Tried to allocate"],
        name: "device memory is used up",
        advice: "no argument is refused; see \"It takes too much\" in symptoms.md",
        is_final: true,
        conditions: &[],
    },
    Cause {
        signs: &[
            "not in libopapi.so",
            "undefined symbol",
            "cannot open shared object",
            "symbol lookup error",
        ],
        name: "the installed libraries lack a function or a library is not found",
        advice: "set_env.sh of the toolkit, or of the package that has the operator, was not read, or the release is \
                 too old: `ascend-attn doctor`",
        is_final: true,
        conditions: &[],
    },
    Cause {
        signs: &["Operation setup failed", "Operation CreateOperation failed"],
        name: "an operation of ATB, which checks its calls by itself",
        advice: "these rules are those of CANN's aclnn operators; ATB writes its reason into its own log",
        is_final: true,
        conditions: &[],
    },
    Cause {
        signs: &[
            "Errno None",
            "driver version",
            "drvErr",
            "npu-smi: command not found",
        ],
        name: "the driver or the process, before any operator",
        advice: "compare the versions of driver, firmware and toolkit: `ascend-attn doctor`",
        is_final: true,
        conditions: &[],
    },
    Cause {
        signs: &[
            "Cannot find bin",
            "does not has any binary",
            "dynamic kernel config",
            "EZ1013",
            "ParseDynamicKernels",
        ],
        name: "the installed kernels have none for this product and these dtypes",
        advice: "install the kernel package of this product (opp), or give dtypes that the operator is registered for",
        is_final: false,
        conditions: &["dtype", "registered", "product"],
    },
    Cause {
        signs: &["SoC version", "not configured through the AddConfig"],
        name: "the operator is not registered for this product",
        advice: "call an operator that the product has",
        is_final: false,
        conditions: &["product"],
    },
    Cause {
        signs: &[
            "507009",
            "507010",
            "507011",
            "507014",
            "507015",
            "507018",
            "507035",
            "507046",
            "507053",
            "aicore exception",
            "aicore execution is abnormal",
            "Aicpu kernel execute failed",
        ],
        name: "a kernel failed on the device, maybe of an earlier call than the one that is named",
        advice: "ASCEND_LAUNCH_BLOCKING=1 names the call; the emulation in ASCEND_EMU_CHECK=strict finds what it reads \
                 or writes wrongly",
        is_final: false,
        conditions: &[],
    },
    Cause {
        signs: &["207005", "207008", "Alloc sq cq fail"],
        name: "the device's streams are used up",
        advice: "capture fewer graphs: graphs.md",
        is_final: false,
        conditions: &[],
    },
    Cause {
        signs: &[
            "107030",
            "107033",
            "captured-stream",
            "Parameter stream is invalid",
        ],
        name: "the runtime refuses what was asked of a stream, such as a wait while it is captured",
        advice: "what cannot be captured: graphs.md",
        is_final: false,
        conditions: &[],
    },
];

/// The causes that a text speaks of.
pub(super) fn causes(text: &str) -> Vec<&'static Cause> {
    let speaks_of = |cause: &&Cause| cause.signs.iter().any(|sign| has(text, sign));
    CAUSES.iter().filter(speaks_of).collect()
}

/// Whether a text has a sign; a status only where it is no part of a longer number.
fn has(text: &str, sign: &str) -> bool {
    let is_digit = |c: Option<char>| c.is_some_and(|c| c.is_ascii_digit());
    let (first, last) = (sign.chars().next(), sign.chars().next_back());
    text.match_indices(sign).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + sign.len()..].chars().next();
        let goes_on = |end, beyond| is_digit(end) && is_digit(beyond);
        !goes_on(first, before) && !goes_on(last, after)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_no_part_of_another_number() {
        assert!(causes("address 1507015, 5070150").is_empty());
        assert_eq!(causes("code 507015.").len(), 1);
    }
}
