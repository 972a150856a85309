//! How likely a rule stands behind a failure, by what the text says of the call: operator, status, checker, product,
//! release and layout.

use ascend_attention::spec::declared::DeclaredOperator;
use ascend_attention::spec::{Cann, INNER_NULLPTR, Level, Rule, Scope, Soc, Span, TILING_ERROR};

use super::operator_names::{Operator, is_path};
use super::reading::{Checker, Reading};
use super::status::Status;
use super::words::words;

/// How much a rule counts that no operator checks.
const UNCHECKED: f64 = 0.5;
/// How much a rule counts whose status is another one than the text's, and one of another checker.
const OTHER_STATUS: f64 = 0.7;
const OTHER_CHECKER: f64 = 0.6;
/// How much a rule counts that the product or the release of the text does not have, or that speaks of other layouts.
const OTHER_TARGET: f64 = 0.3;
const OTHER_LAYOUT: f64 = 0.5;
/// How much a rule of Ascend 950 alone, or of a release that is not out, counts where the text names neither.
const RARE_TARGET: f64 = 0.8;
/// How much a rule counts of an operator that few programs call, where the text names none.
const RARE_OPERATOR: f64 = 0.8;

/// Whether a rule may be of the operator that the text names. Conditions of a library count where it names none.
pub(super) fn is_of(rule: &Rule, reading: &Reading) -> bool {
    let Some(operator) = reading.operator else {
        return true;
    };
    let checker = Operator::of_rule(rule);
    let inherits = matches!(operator, Operator::Declared(operator) if is_path(operator));
    reading.rules.contains(&rule.id)
        || checker == Some(operator)
        || inherits && checker == Some(Operator::Declared(DeclaredOperator::FusedInferAttentionScore))
}

/// How likely it is that a rule stands behind a failure with what the text says of the call.
pub(super) fn likelihood(rule: &Rule, reading: &Reading) -> f64 {
    let status = match rule.level {
        Level::Lint | Level::Library | Level::Unsupported => UNCHECKED,
        Level::Rule | Level::HostCrash if may_return(rule, reading) => 1.0,
        Level::Rule | Level::HostCrash => OTHER_STATUS,
    };
    let checker = match reading.checker {
        Some(checker) if !may_be_of(rule, checker) => OTHER_CHECKER,
        _ => 1.0,
    };
    let usual = [
        Operator::Declared(DeclaredOperator::FusedInferAttentionScore),
        Operator::Declared(DeclaredOperator::FlashAttentionScore),
    ];
    let operator = match Operator::of_rule(rule) {
        Some(operator) if reading.operator.is_none() && !usual.contains(&operator) => RARE_OPERATOR,
        _ => 1.0,
    };
    status * checker * operator * target(rule, reading) * layout(rule, reading)
}

/// Whether a rule's status is one of the text's, or the text has none. From 9.2 on the status of an inner null stands
/// for what the tiling refuses.
fn may_return(rule: &Rule, reading: &Reading) -> bool {
    let is_of = |status: Status| status.0 == rule.status || status.0 == INNER_NULLPTR && rule.status == TILING_ERROR;
    reading.refusals().next().is_none() || reading.refusals().any(is_of)
}

/// Whether a rule follows an entry of a checker's part of the check list, or of none: C to E are the prefill path, F
/// the decode path, G and I the unified checker.
fn may_be_of(rule: &Rule, checker: Checker) -> bool {
    let entries = rule.source.strip_prefix("check").unwrap_or("");
    let entries = entries.trim_start_matches(['s', ' ']);
    let entries = entries.split(';').next().unwrap_or("").split(", ");
    let mut checkers = entries.filter_map(|entry| match entry.chars().next()? {
        'C' | 'D' | 'E' => Some(Checker::Prefill),
        'F' => Some(Checker::Decode),
        'G' | 'I' => Some(Checker::Unified),
        _ => None,
    });
    let first = checkers.next();
    first.is_none() || first == Some(checker) || checkers.any(|other| other == checker)
}

/// How likely a rule is on the product and in the release that the text names.
fn target(rule: &Rule, reading: &Reading) -> f64 {
    let (a2_a3, ascend950) = (rule.scope.a2_a3, rule.scope.ascend950);
    let is_free = rule.since.is_none() || rule.scope == Scope::ATLAS_INFERENCE;
    let holds = |span: Option<Span>| match (span, reading.cann) {
        (Some(span), Some(cann)) => span.holds(cann),
        (span, _) => span.is_some(),
    };
    match reading.soc {
        _ if is_free => 1.0,
        Some(Soc::Ascend950) if !holds(ascend950) => OTHER_TARGET,
        Some(Soc::AtlasA2 | Soc::AtlasA3) if !holds(a2_a3) => OTHER_TARGET,
        None if !holds(a2_a3) && !holds(ascend950) => OTHER_TARGET,
        None if a2_a3.is_none() => RARE_TARGET,
        None if a2_a3.is_some_and(|span| span.since > Cann::NEWEST) => RARE_TARGET,
        _ => 1.0,
    }
}

/// How likely a rule is for the layouts that the text names: packed ones, or those with a batch axis.
fn layout(rule: &Rule, reading: &Reading) -> f64 {
    let text = |word: &str| reading.words.contains_key(word);
    let batched = ["bsh", "bsnd", "bnsd"];
    let (text_packed, text_batched) = (text("packed"), batched.iter().any(|layout| text(layout)));
    let words: Vec<String> = [rule.id, rule.holds].into_iter().flat_map(words).collect();
    let has = |word: &str| words.iter().any(|known| known == word);
    let (packed, batched) = (has("packed"), batched.iter().any(|layout| has(layout)));
    match (text_packed, text_batched) {
        (true, false) if batched && !packed => OTHER_LAYOUT,
        (false, true) if packed && !batched => OTHER_LAYOUT,
        _ => 1.0,
    }
}
