//! Rules, and the refusal of a call that breaks one.

use crate::operator::{Change, Fix, OperatorVersion, written};
use crate::{Cann, Soc, Target};
use std::fmt;

/// What breaking a [`Rule`] means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// The operator itself refuses the call with the rule's status.
    Rule,
    /// The operator takes the call and then ignores, misreads or overruns something. The emulator takes it too; the
    /// safe layer stops it unless the caller allows the lint by name.
    Lint,
    /// The operator's host code ends the process: by a division by zero, which does not trap on aarch64, or by a read
    /// through a null pointer. The verdict is that of a host where the call continues: the rule's status, or 0 where
    /// such a host takes the call. Nothing allows the call.
    HostCrash,
    /// A library above the contract refuses: what was asked of it stands between calls, or before there is one, so
    /// that no operator is asked. Nothing was changed.
    Library,
    /// The call may be right, but this library cannot check or compute it yet.
    Unsupported,
}

/// The releases in which a rule holds on a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// First release.
    pub since: Cann,
    /// Last release; `None` while it still holds.
    pub until: Option<Cann>,
}

impl Span {
    /// Whether `cann` is in the span.
    pub const fn holds(self, cann: Cann) -> bool {
        let before = match self.until {
            Some(until) => cann as u8 > until as u8,
            None => false,
        };
        cann as u8 >= self.since as u8 && !before
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.since, self.until) {
            (Cann::V8_1, None) => f.write_str("all"),
            (Cann::V8_1, Some(until)) => write!(f, "to {until}"),
            (since, Some(until)) if since == until => since.fmt(f),
            (since, None) => write!(f, "{since} on"),
            (since, Some(until)) => write!(f, "{since} to {until}"),
        }
    }
}

/// On which products and in which releases a rule holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scope {
    /// The releases on Atlas A2 and A3, whose checks are the same; also for 310P, in operators that run there, and
    /// for Ascend 950 in releases before 9.0, which do not know that product.
    pub a2_a3: Option<Span>,
    /// The releases on Ascend 950.
    pub ascend950: Option<Span>,
}

impl Scope {
    /// Every product, every release.
    pub const ALL: Scope = Scope { ascend950: Some(Span { since: Cann::V9_0, until: None }), ..Scope::A2_A3 };
    /// Atlas A2 and A3, every release.
    pub const A2_A3: Scope = Scope { a2_a3: Some(Span { since: Cann::V8_1, until: None }), ascend950: None };
    /// Atlas A2 and A3 from 8.5 on, and Ascend 950: the unified checks.
    pub const UNIFIED: Scope = Scope::ALL.since(Cann::V8_5);
    /// Ascend 950 alone.
    pub const ASCEND_950: Scope = Scope { a2_a3: None, ..Scope::ALL };

    /// 310P alone: neither Atlas A2 and A3 nor Ascend 950.
    pub const ATLAS_INFERENCE: Scope = Scope { a2_a3: None, ascend950: None };

    /// This scope, on Atlas A2 and A3 from release `cann` on only.
    #[must_use]
    pub const fn since(self, cann: Cann) -> Scope {
        Scope {
            a2_a3: match self.a2_a3 {
                Some(span) => Some(Span { since: cann, until: span.until }),
                None => None,
            },
            ..self
        }
    }

    /// This scope, on Ascend 950 from release `cann` on only.
    #[must_use]
    pub const fn since_on_950(self, cann: Cann) -> Scope {
        Scope {
            ascend950: match self.ascend950 {
                Some(span) => Some(Span { since: cann, until: span.until }),
                None => None,
            },
            ..self
        }
    }

    /// This scope, on Atlas A2 and A3 up to release `cann` only.
    #[must_use]
    pub const fn until(self, cann: Cann) -> Scope {
        Scope {
            a2_a3: match self.a2_a3 {
                Some(span) => Some(Span { since: span.since, until: Some(cann) }),
                None => None,
            },
            ..self
        }
    }

    /// This scope, on Ascend 950 up to release `cann` only.
    #[must_use]
    pub const fn until_on_950(self, cann: Cann) -> Scope {
        Scope {
            ascend950: match self.ascend950 {
                Some(span) => Some(Span { since: span.since, until: Some(cann) }),
                None => None,
            },
            ..self
        }
    }

    /// Whether `target` is within the scope.
    pub fn holds(self, target: Target) -> bool {
        if self == Scope::ATLAS_INFERENCE {
            return target.soc == Soc::AtlasInference;
        }
        let span = if target.is_950() { self.ascend950 } else { self.a2_a3 };
        span.is_some_and(|span| span.holds(target.cann))
    }
}

/// One condition that a call must hold, with a stable name.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rule {
    /// Stable name, for example `atten_mask.compressed_shape`.
    pub id: &'static str,
    /// The condition that must hold, in one sentence.
    pub holds: &'static str,
    /// What to change in a call that breaks the rule, in one sentence.
    pub fix: &'static str,
    /// Where the condition comes from: an entry of the operator's check list, or a section of its documentation.
    pub source: &'static str,
    /// CANN's status for a call that breaks the rule; 0 for a lint, for a condition of a library, and for a crash
    /// where other hosts take the call.
    pub status: i32,
    /// The operator that the condition applies to, from this version on; `None` for a condition of a library.
    pub since: Option<OperatorVersion>,
    /// Who refuses a call that breaks the rule.
    pub level: Level,
    /// Whether the device may read or write outside of the call's tensors where the lint is broken; false for a rule,
    /// whose call is never launched. Where it is not known what the operator does, this is true.
    pub overruns: bool,
    /// Why the lint overruns memory or does not, or how the process ends, in one sentence; empty for a rule.
    pub reach: &'static str,
    /// On which products and in which releases the condition is checked.
    pub scope: Scope,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id)
    }
}

impl Rule {
    /// A condition of a library above the contract, as [`library_rules!`](crate::library_rules) declares it.
    pub const fn of_library(id: &'static str, holds: &'static str, fix: &'static str, library: &'static str) -> Self {
        Rule {
            id,
            holds,
            fix,
            source: library,
            status: 0,
            since: None,
            level: Level::Library,
            overruns: false,
            reach: "",
            scope: Scope::ALL,
        }
    }

    /// Builds the violation of this rule by the value `given`, where `allowed` names the values that hold. The fix is
    /// the rule's own.
    #[cold]
    pub fn broken(&'static self, given: impl fmt::Display, allowed: impl fmt::Display) -> Violation {
        broken(self, given, allowed, self.fix)
    }
}

/// Status of a null required argument; in FlashAttentionScore also of a call that its shape inference or its tiling
/// refuses.
pub const PARAM_NULLPTR: i32 = 161_001;
/// Status of a missing argument that a hand-written entry point refuses without a status of its own.
pub const API_ERROR: i32 = -1;
/// Status of an argument outside the operator's registered dtypes and formats.
pub const PARAM_INVALID: i32 = 161_002;
/// Status of a call that the operator's tiling refuses.
pub const TILING_ERROR: i32 = 561_002;
/// Status of a call that the tiling of PromptFlashAttention refuses, and from 9.2 on of every call that a hand-written
/// entry point of FusedInferAttentionScore passes on and that is refused further in.
pub const INNER_NULLPTR: i32 = 561_103;
/// Status of an entry point that the product does not have.
pub const RUNTIME_ERROR: i32 = 361_001;
/// Status of ATB for a parameter, or a value on the host, that an operator does not take (`ERROR_INVALID_PARAM`).
pub(crate) const ATB_INVALID_PARAM: i32 = 1;
/// Status of ATB for a tensor of another type (`ERROR_INVALID_TENSOR_DTYPE`).
pub(crate) const ATB_INVALID_TENSOR_DTYPE: i32 = 6;
/// Status of ATB for a tensor in another format (`ERROR_INVALID_TENSOR_FORMAT`).
pub(crate) const ATB_INVALID_TENSOR_FORMAT: i32 = 7;
/// Status of ATB for a tensor of another shape (`ERROR_INVALID_TENSOR_DIM`).
pub(crate) const ATB_INVALID_TENSOR_DIM: i32 = 8;
/// Status of ATB for a tensor that is missing (`ERROR_INVALID_TENSOR_NUM`).
pub(crate) const ATB_INVALID_TENSOR_NUM: i32 = 15;
/// Status of a call for which no kernel exists.
pub const FIND_KERNEL_ERROR: i32 = 561_003;

/// The refusal of a call that breaks a rule: the rule, the value that breaks it, the allowed values, and the fix.
///
/// `{:?}` is the text of `{}`, so that a program whose `main` returns it prints what a person can read; `{:#?}` shows
/// the fields.
#[derive(Clone, PartialEq, thiserror::Error)]
#[error("{}: {holds}; given {given}, allowed: {allowed}; fix: {fix}", rule.id, holds = rule.holds)]
#[non_exhaustive]
pub struct Violation {
    /// The broken rule.
    pub rule: &'static Rule,
    /// The value that breaks it.
    pub given: String,
    /// The values that would hold the rule.
    pub allowed: String,
    /// What to change: the rule's own advice, or one that fits this call better.
    pub fix: String,
    /// The changes that the fix begins with, where they can be made without knowing more than the call: see
    /// [`Arguments::changed`](crate::ops::fused_infer_attention_score::Arguments::changed). Where a change gives or
    /// converts a tensor, the caller makes its contents, as the rest of the fix describes.
    pub changes: Vec<Change>,
    /// CANN's status: the rule's, or another one that the entry point makes of it.
    pub(crate) status: i32,
    /// Another target that takes the call unchanged, if
    /// [`FiaCall::taken_by`](crate::ops::fused_infer_attention_score::FiaCall::taken_by) was called and found one.
    pub taken_by: Option<Target>,
}

impl Violation {
    /// The violation of `rule` by the value `given`, where `allowed` names the values that hold it and `fix` says
    /// what to change in this call.
    #[cold]
    pub fn new(
        rule: &'static Rule,
        given: impl fmt::Display,
        allowed: impl fmt::Display,
        fix: impl fmt::Display,
    ) -> Self {
        broken(rule, given, allowed, format_args!("{fix}"))
    }

    /// The refusal of a call that needs `feature`, named by the argument or value that selects it, by
    /// [`UNSUPPORTED`].
    #[cold]
    pub fn unsupported(feature: impl fmt::Display) -> Self {
        UNSUPPORTED.broken(feature, "what this library computes")
    }

    /// Whether the call may be right, and this library cannot check or compute it.
    pub fn is_unsupported(&self) -> bool {
        self.rule.level == Level::Unsupported
    }

    /// CANN's status for this refusal: the rule's, unless the entry point turns it into another one, as those of
    /// FusedInferAttentionScore V1 to V4 do on Atlas A2 and A3 from 9.2 on.
    pub fn status(&self) -> i32 {
        self.status
    }
}

impl fmt::Debug for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return fmt::Display::fmt(self, f);
        }
        f.debug_struct("Violation")
            .field("rule", self.rule)
            .field("given", &self.given)
            .field("allowed", &self.allowed)
            .field("fix", &self.fix)
            .field("changes", &self.changes)
            .field("status", &self.status())
            .field("taken_by", &self.taken_by)
            .finish()
    }
}

/// `call.unsupported`: a call asks only for what this library checks and computes. The operator may well take
/// it.
pub static UNSUPPORTED: Rule = Rule {
    status: FIND_KERNEL_ERROR,
    level: Level::Unsupported,
    ..Rule::of_library(
        "call.unsupported",
        "a call asks only for what this library checks and computes",
        "leave out what is named, or call the operator by its C functions, which the safe layer does not check",
        env!("CARGO_PKG_NAME"),
    )
};

/// Builds the violation of `rule`; the only place where the contract allocates.
#[cold]
pub(crate) fn broken(
    rule: &'static Rule,
    given: impl fmt::Display,
    allowed: impl fmt::Display,
    fix: impl Fix,
) -> Violation {
    let (changes, fix) = written(fix);
    Violation {
        rule,
        given: given.to_string(),
        allowed: allowed.to_string(),
        fix,
        changes,
        status: rule.status,
        taken_by: None,
    }
}

/// Returns the violation of a rule unless its condition holds. The texts are evaluated only when it does not. Without
/// a fix for the call, the rule's own fix is used. With a leading `for target =>`, the rule is checked only on
/// targets in its scope.
macro_rules! require {
    (for $target:expr => $holds:expr, $rule:path, $given:expr, $allowed:expr $(,)?) => {
        $crate::rule::require!($holds || !$rule.scope.holds($target), $rule, $given, $allowed, $rule.fix)
    };
    (for $target:expr => $holds:expr, $rule:path, $given:expr, $allowed:expr, $fix:expr $(,)?) => {
        $crate::rule::require!($holds || !$rule.scope.holds($target), $rule, $given, $allowed, $fix)
    };
    ($holds:expr, $rule:path, $given:expr, $allowed:expr $(,)?) => {
        $crate::rule::require!($holds, $rule, $given, $allowed, $rule.fix)
    };
    ($holds:expr, $rule:path, $given:expr, $allowed:expr, $fix:expr $(,)?) => {
        if !($holds) {
            return Err($crate::rule::broken(&$rule, $given, $allowed, $fix));
        }
    };
}

/// Reports a lint unless its condition holds. The texts are evaluated only when it does not. Without a fix for the
/// call, the lint's own fix is used.
macro_rules! lint {
    ($report:expr, $holds:expr, $rule:path, $given:expr, $allowed:expr $(,)?) => {
        $crate::rule::lint!($report, $holds, $rule, $given, $allowed, $rule.fix)
    };
    ($report:expr, $holds:expr, $rule:path, $given:expr, $allowed:expr, $fix:expr $(,)?) => {
        if !$holds {
            $report($crate::rule::broken(&$rule, $given, $allowed, $fix));
        }
    };
}

/// Declares the rules of one file: a static for each and the file's table `RULES`. In the place of a rule's status a
/// lint has `Lint("why it stays within the tensors")` or `Overrun("why it may not")`, a crash `HostCrash("how")`
/// where other hosts take the call, `TilingCrash("how")` or `NullptrCrash("how")` where they refuse it with that
/// status. Texts one after another are joined. The scope at the head of the table applies to every rule that names
/// none of its own after its source. A file has the operator's `Version` in scope, whose versions the rules name.
///
/// Rules that operators share are lines of their own: `format of` is `FORMAT`, of tensors in a plain format, and `scale
/// of` are `SCALE`, `SCALE_ZERO` and `SCALE_INVERSE`, the lints of `scaleValue`, with the name of what it multiplies,
/// what it usually is, what it is not, and what follows from 0.
macro_rules! rules {
    (in $scope:expr; $($name:ident = $($id:literal)+, $status:ident $(($reach:literal))?, $since:ident,
        $($source:literal)+ $(in $own:expr)?, $($holds:literal)+, $($fix:literal)+;)*) => {
        $(
            #[doc = concat!("`", $($id,)+ "`: ", $($holds,)+ " (", $($source,)+ ").")]
            #[allow(rustdoc::broken_intra_doc_links, reason = "shapes such as [tokens] are no links")]
            pub static $name: $crate::rule::Rule = $crate::rule::Rule {
                id: concat!($($id),+),
                holds: concat!($($holds),+),
                fix: concat!($($fix),+),
                source: concat!($($source),+),
                status: rules!(@status $status),
                since: Some(Version::$since.info()),
                level: rules!(@level $status),
                overruns: rules!(@overruns $status),
                reach: concat!($($reach)?),
                scope: rules!(@scope $scope $(, $own)?),
            };
        )*
        /// Every rule of this file.
        pub static RULES: &[&$crate::rule::Rule] = &[$(&$name,)*];
    };
    (in $scope:expr; $($table:tt)*) => { $crate::rule::rules! { @join [$scope] [] $($table)* } };
    (@join [$scope:expr] [$($done:tt)*]) => { $crate::rule::rules! { in $scope; $($done)* } };
    (@join [$scope:expr] [$($done:tt)*] format of $id:literal, $status:ident, $($source:literal)+; $($rest:tt)*) => {
        $crate::rule::rules! {
            @join [$scope] [
                $($done)*
                FORMAT = $id ".format", $status, V1, $($source)+,
                    "tensors are in a plain format such as ND, with dimensions of at least 0 whose bytes can be "
                    "addressed",
                    "describe the tensor as ND, with a shape that memory can hold";
            ] $($rest)*
        }
    };
    (@join [$scope:expr] [$($done:tt)*]
        scale of $id:literal, $operator:literal, $factor:literal, $usual:literal, $dim:literal, $($zero:literal)+;
        $($rest:tt)*
    ) => {
        $crate::rule::rules! {
            @join [$scope] [
                $($done)*
                SCALE = $id ".scale_finite", Lint("only numbers change"), V1, $operator " documentation, scaleValue",
                    "scaleValue is a finite number in 32 bits",
                    "pass the factor of the " $factor ", " $usual;
                SCALE_ZERO = $id ".scale_zero", Lint("only numbers change"), V1,
                    $operator " documentation, scaleValue",
                    "scaleValue is not 0 in 32 bits",
                    "pass one over the root of " $($zero)+;
                SCALE_INVERSE = $id ".scale_inverse", Lint("only numbers change"), V1,
                    $operator " documentation, scaleValue",
                    "scaleValue is neither " $dim " nor its root",
                    "pass one over the root: the operator multiplies " $factor " by scaleValue, it does not divide";
            ] $($rest)*
        }
    };
    (@join [$scope:expr] [$($done:tt)*]
        $name:ident = $($id:literal)+, $status:ident $(($reach:literal))?, $since:ident,
        $($source:literal)+ $(in $own:expr)?, $($holds:literal)+, $($fix:literal)+; $($rest:tt)*
    ) => {
        $crate::rule::rules! {
            @join [$scope] [
                $($done)*
                $name = $($id)+, $status $(($reach))?, $since, $($source)+ $(in $own)?, $($holds)+, $($fix)+;
            ] $($rest)*
        }
    };
    (@scope $scope:expr) => {{
        #[allow(unused_imports, reason = "scopes name what they need")]
        use $crate::{Scope, Cann::{V8_1, V8_5, V9_0, V9_1, V9_2}};
        $scope
    }};
    (@scope $scope:expr, $own:expr) => { rules!(@scope $own) };
    (@status Lint) => { 0 };
    (@status Overrun) => { 0 };
    (@status HostCrash) => { 0 };
    (@status TilingCrash) => { $crate::rule::TILING_ERROR };
    (@status NullptrCrash) => { $crate::rule::PARAM_NULLPTR };
    (@status $status:ident) => { $crate::rule::$status };
    (@overruns Overrun) => { true };
    (@overruns $status:ident) => { false };
    (@level Lint) => { $crate::rule::Level::Lint };
    (@level Overrun) => { $crate::rule::Level::Lint };
    (@level HostCrash) => { $crate::rule::Level::HostCrash };
    (@level TilingCrash) => { $crate::rule::Level::HostCrash };
    (@level NullptrCrash) => { $crate::rule::Level::HostCrash };
    (@level $status:ident) => { $crate::rule::Level::Rule };
}

/// Declares the conditions of a library above the contract: a static [`Rule`] of [`Level::Library`] for each, and the
/// table `RULES` of them all. Each has a name, the condition that must hold, and what to change where it does not.
///
/// ```
/// ascend_spec::library_rules! {
///     POOL_SIZE = "pool.size", "a pool has blocks", "give the pool a block";
/// }
///
/// let refused = POOL_SIZE.broken("0 blocks", "1 or more");
/// assert_eq!(refused.rule, &POOL_SIZE);
/// assert_eq!(
///     refused.to_string(),
///     "pool.size: a pool has blocks; given 0 blocks, allowed: 1 or more; fix: give the pool a block"
/// );
/// ```
#[macro_export]
macro_rules! library_rules {
    ($($name:ident = $id:literal, $($holds:literal)+, $($fix:literal)+;)*) => {
        $(
            #[doc = concat!("`", $id, "`: ", $($holds,)+ ".")]
            pub static $name: $crate::Rule = $crate::Rule::of_library(
                $id,
                concat!($($holds),+),
                concat!($($fix),+),
                env!("CARGO_PKG_NAME"),
            );
        )*
        /// Every rule of this module.
        pub static RULES: &[&$crate::Rule] = &[$(&$name,)*];
    };
}

pub(crate) use {lint, require, rules};

/// Rules, and the part of the book's page "Where hardware is known to differ" that is about their calls.
const HARDWARE: [(&str, &str); 13] = [
    ("atten_mask.full", "one-mask-row-for-all"),
    ("atten_mask.full_shape", "one-mask-row-for-all"),
    ("atten_mask.compressed_shape_decode", "one-mask-row-for-all"),
    ("atten_mask.prefix_decode", "one-mask-row-for-all"),
    ("sparse_mode.one_row", "one-mask-row-for-all"),
    ("sparse_mode.single_row", "one-mask-row-for-all"),
    ("tokens.without_mask", "one-mask-row-for-all"),
    ("pse_shift.shape", "one-mask-row-for-all"),
    ("pse_shift.one_row", "one-mask-row-for-all"),
    ("packed.q_total", "vision-towers-tnd-mode-0-no-mask"),
    ("block_size.prefill", "pages-of-16-tokens"),
    ("block_size.decode", "pages-of-16-tokens"),
    ("block_size.unified", "pages-of-16-tokens"),
];

impl Rule {
    /// Whether the rule is a lint that asks for a newer version of an operator, and says nothing of the call.
    pub fn is_deprecation(&self) -> bool {
        self.id.ends_with(".deprecated")
    }

    /// Returns where the book lists public reports of hardware that treats calls under this rule differently: a page
    /// of `docs/src`, and a part of it.
    pub fn hardware_reports(&self) -> Option<String> {
        let mut known = HARDWARE.into_iter();
        let (_, part) = known.find(|(id, _)| *id == self.id)?;
        Some(format!("hardware.md#{part}"))
    }
}

#[cfg(test)]
mod reports_tests {
    use super::*;
    use crate::every_rule;

    #[test]
    fn reports_are_about_rules_that_are_there() {
        for (id, part) in HARDWARE {
            let mut rules = every_rule().filter(|rule| rule.id == id);
            let reports = rules.next().unwrap().hardware_reports().unwrap();
            assert_eq!(reports, format!("hardware.md#{part}"));
        }
    }
}
