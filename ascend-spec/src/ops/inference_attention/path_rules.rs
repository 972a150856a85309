//! The rules that PromptFlashAttention and IncreFlashAttention both have.

/// Declares the rules of an operator that is one path of FusedInferAttentionScore: those that each such operator has,
/// and its own between them, in the form of [`rules!`](crate::rule::rules). `$id` begins each id; versions before
/// `$newest` are `$older`.
macro_rules! path_rules {
    (
        $id:literal, $operator:literal, newest $newest:literal, older $older:literal, required $required:literal;
        $($own:tt)*
    ) => {
        $crate::rule::rules! {
            in Scope::ALL;
            SUCCESSOR = $id ".successor", RUNTIME_ERROR, V1,
                $operator " entry points, Ascend 950" in Scope::ASCEND_950,
                "Ascend 950 computes attention by FusedInferAttentionScore",
                "call aclnnFusedInferAttentionScoreV5";
            PRODUCT = $id ".product", FIND_KERNEL_ERROR, V1, $operator " documentation, products",
                "the product has the operator",
                "run on Atlas A2, Atlas A3 or the Atlas inference series (310P)";
            REQUIRED = $id ".required", PARAM_NULLPTR, V1, $operator " documentation, return values",
                $required " are given",
                "pass every required argument";
            $($own)*
            PSE_DROPPED = $id ".pse_dropped", Lint("the tensor is not looked at"), V1, $operator ", V1 and V2",
                "V1 and V2 come without pseShift: they take it and compute without it",
                "call aclnn" $operator $newest;
            DEPRECATED = $id ".deprecated", Lint("nothing changes yet"), V1, $operator " documentation, deprecation",
                "calls go to " $newest ": " $older " are announced to go in December 2026",
                "call aclnn" $operator $newest;
        }
    };
}

pub(crate) use path_rules;
