//! The table is the bindings: same functions, same types, same number of arguments.

use std::collections::BTreeSet;

use ascend_sys::FUNCTIONS;

macro_rules! prove {
    ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
        // Compiles only if each declaration in the table is that of the bindings. Nothing here is evaluated at run
        // time, so the functions need not exist.
        $( const _: unsafe extern "C" fn($( $type ),*) -> $result = ascend_sys::bindings::$name; )*

        /// Names of the arguments by function.
        const ARGUMENTS: &[(&str, &[&str])] = &[$( (stringify!($name), &[$( stringify!($argument) ),*]) ),*];
    };
}

ascend_sys::for_each_function! { prove }

/// Names of a function's arguments, or nothing when the table does not have it.
fn arguments(function: &str) -> Option<&'static [&'static str]> {
    let entry = ARGUMENTS.iter().find(|(name, _)| *name == function);
    entry.map(|(_, arguments)| *arguments)
}

#[test]
fn the_attention_operator_has_the_documented_number_of_arguments() {
    let count_of = |version: &str, phase: &str| {
        let function = format!("aclnnFusedInferAttentionScore{version}{phase}");
        arguments(&function).map(<[&str]>::len)
    };
    for (version, count) in [("", 32), ("V2", 41), ("V3", 44), ("V4", 47), ("V5", 50)] {
        assert_eq!(count_of(version, ""), Some(4), "{version}");
        assert_eq!(count_of(version, "GetWorkspaceSize"), Some(count), "{version}");
        let maximum = (!version.is_empty()).then_some(count);
        assert_eq!(count_of(version, "GetMaxWorkspaceSize"), maximum, "{version}");
    }
}

#[test]
fn each_version_of_the_operator_extends_the_one_before() {
    let names = |version: &str| {
        let function = format!("aclnnFusedInferAttentionScore{version}GetWorkspaceSize");
        arguments(&function).unwrap_or_default()
    };
    let versions = ["", "V2", "V3", "V4", "V5"];
    for pair in versions.windows(2) {
        let (old, new) = (names(pair[0]), names(pair[1]));
        let kept: Vec<&str> = new.iter().copied().filter(|name| old.contains(name)).collect();
        assert_eq!(kept, old, "{} to {}", pair[0], pair[1]);
        assert!(new.len() > old.len());
    }
    let newest = names("V5");
    assert_eq!(newest[0], "query");
    assert_eq!(newest[14], "blockTableOptional");
    assert_eq!(newest[28], "learnableSinkOptional");
    assert_eq!(newest[31], "numHeads");
    assert_eq!(newest[45], "pseType");
    assert_eq!(newest[46..], ["attentionOut", "softmaxLse", "workspaceSize", "executor"]);
}

#[test]
fn the_operators_beside_attention_have_their_documented_arguments() {
    let scatter = arguments("aclnnScatterPaKvCacheGetWorkspaceSize").unwrap_or_default();
    // The slot mapping stands between the key's cache and the value.
    assert_eq!(scatter[..5], ["key", "keyCacheRef", "slotMapping", "value", "valueCacheRef"]);
    assert_eq!(scatter.len(), 14);
    let update = arguments("aclnnAttentionUpdateGetWorkspaceSize").unwrap_or_default();
    assert_eq!(update, ["lse", "localOut", "updateType", "out", "lseOut", "workspaceSize", "executor"]);
    for operator in ["aclnnScatterPaKvCache", "aclnnAttentionUpdate"] {
        assert_eq!(arguments(operator).map(<[&str]>::len), Some(4));
    }
}

#[test]
fn the_operators_of_training_and_of_inference_cards_have_their_documented_arguments() {
    let counts = [
        ("FlashAttentionScore", 22),
        ("FlashAttentionScoreV2", 25),
        ("FlashAttentionScoreV3", 26),
        ("FlashAttentionScoreV4", 37),
        ("FlashAttentionVarLenScore", 24),
        ("FlashAttentionVarLenScoreV2", 27),
        ("FlashAttentionVarLenScoreV3", 29),
        ("FlashAttentionVarLenScoreV4", 25),
        ("FlashAttentionVarLenScoreV5", 31),
        ("QuantFlashAttentionScore", 20),
        ("RingAttentionUpdate", 13),
        ("RingAttentionUpdateV2", 14),
        ("SparseFlashAttention", 23),
        ("SparseFlashAttentionV2", 24),
        ("PromptFlashAttention", 15),
        ("PromptFlashAttentionV2", 22),
        ("PromptFlashAttentionV3", 23),
        ("IncreFlashAttention", 13),
        ("IncreFlashAttentionV2", 18),
        ("IncreFlashAttentionV3", 23),
        ("IncreFlashAttentionV4", 24),
    ];
    for (operator, count) in counts {
        let phase_one = arguments(&format!("aclnn{operator}GetWorkspaceSize"));
        assert_eq!(phase_one.map(<[&str]>::len), Some(count), "{operator}");
        let phase_two = arguments(&format!("aclnn{operator}"));
        assert_eq!(phase_two.map(<[&str]>::len), Some(4), "{operator}");
    }
    // Rotary parts stand beside what they belong to in packed calls, and behind the masks in others.
    let place = |operator: &str| {
        let names = arguments(&format!("aclnn{operator}GetWorkspaceSize")).unwrap_or_default();
        let rope = names.iter().position(|name| *name == "queryRopeOptional");
        let sink = names.iter().position(|name| *name == "sinkOptional");
        (rope, sink)
    };
    assert_eq!(place("FlashAttentionVarLenScoreV5"), (Some(1), Some(9)));
    assert_eq!(place("FlashAttentionScoreV4"), (Some(7), Some(12)));
    let measured = arguments("aclnnFlashAttentionVarLenScoreV5GetMaxWorkspaceSize");
    assert_eq!(measured.map(<[&str]>::len), Some(31));
}

#[test]
fn a_function_stands_once_in_the_table() {
    let unique: BTreeSet<&str> = FUNCTIONS.iter().map(|(name, _)| *name).collect();
    assert_eq!(unique.len(), FUNCTIONS.len());
    assert_eq!(ARGUMENTS.len(), FUNCTIONS.len());
}
