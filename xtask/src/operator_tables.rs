//! The generated tables of the book's pages about single operators: entry points and arguments, and where
//! the rules stand.

use crate::marked::Marked;
use crate::rule_tables::{self, operator_name};
use ascend_spec::declared::{AnyArguments, DeclaredOperator};
use ascend_spec::operator::{Kind, Value};
use ascend_spec::{OperatorVersion, Rule, every_rule};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

/// The pages, and the operators that each is about.
fn pages() -> BTreeMap<&'static str, Vec<DeclaredOperator>> {
    let mut pages = BTreeMap::<_, Vec<_>>::new();
    for &operator in DeclaredOperator::ALL {
        if let Some(page) = operator.page() {
            pages.entry(page).or_default().push(operator);
        }
    }
    pages
}

/// Writes the tables, or compares them with those in the tree.
pub(crate) fn renew(root: &Path, compare: bool) -> Result<(), String> {
    for (page, operators) in pages() {
        let part = Marked { page: &format!("docs/src/{page}.md"), name: "tables", task: "rules" };
        part.renew(root, &tables(&operators), compare)?;
    }
    Ok(())
}

fn tables(operators: &[DeclaredOperator]) -> String {
    let mut text =
        "\n## Entry points\n\n| function | `op`, `op_version` in case files | CANN |\n|---|---|---|\n".to_owned();
    for operator in operators {
        for (number, version) in (1..).zip(operator.versions()) {
            let _ = writeln!(
                text,
                "| `{}` | `{}`, {number} | {} |",
                version.symbol(),
                operator.name(),
                version.since_cann()
            );
        }
    }
    // Operators of one page mostly have one list of arguments.
    let mut lists: Vec<DeclaredOperator> = operators.to_vec();
    lists.dedup_by_key(|operator| names(*operator));
    for &operator in &lists {
        let whose = match lists.len() {
            1 => String::new(),
            _ => format!(" of {operator:?}"),
        };
        let _ = writeln!(
            text,
            "\n## Arguments{whose}\n\n| argument | CANN's name | kind | version | default | |\n\
             |---|---|---|---|---|---|"
        );
        let plain = AnyArguments::<()>::new(operator);
        for parameter in operator.parameters() {
            let _ = writeln!(
                text,
                "| `{}` | `{}` | {} | {} | {} | {} |",
                parameter.name,
                parameter.acl_name,
                kind(parameter.kind),
                parameter.since,
                default(plain.value(parameter.name)),
                parameter.doc,
            );
        }
    }
    text.push_str("\n## Rules\n\n");
    let is_of = |rule: &&Rule| operators.iter().any(|&operator| is_of(operator, rule.since));
    let rules: Vec<&Rule> = every_rule().filter(is_of).collect();
    for rules in rules.chunk_by(|one, next| operator_name(one) == operator_name(next)) {
        let name = operator_name(rules[0]);
        let _ = writeln!(
            text,
            "[The rules of {name}](rules.md#{}) stand with those of all operators; {}.\n",
            name.to_lowercase(),
            rule_tables::counted(rules)
        );
    }
    text
}

/// Names of an operator's arguments.
fn names(operator: DeclaredOperator) -> Vec<&'static str> {
    operator.parameters().map(|parameter| parameter.name).collect()
}

/// Whether a rule that holds since a version belongs to the operator.
fn is_of(operator: DeclaredOperator, since: Option<OperatorVersion>) -> bool {
    operator.versions().any(|version| Some(version) == since)
}

fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Tensor => "tensor",
        Kind::TensorList => "list of tensors",
        Kind::InOut => "tensor, updated in place",
        Kind::Output => "output",
        Kind::Ints | Kind::IntList => "integers on the host",
        Kind::Int => "integer",
        Kind::Int8 => "integer of 8 bits",
        Kind::Float => "number",
        Kind::Flag => "truth value",
        Kind::Text => "text",
        Kind::OptionalText => "text, or null",
    }
}

fn default(value: Option<Value<'_>>) -> String {
    match value {
        Some(Value::Int(value)) => value.to_string(),
        Some(Value::Float(value)) => value.to_string(),
        Some(Value::Flag(value)) => value.to_string(),
        Some(Value::Text(Some(text))) => format!("`{text}`"),
        Some(Value::Text(None) | Value::Ints(_)) | None => "null".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_in_the_tree_are_current() {
        renew(&crate::root(), true).unwrap();
    }

    #[test]
    fn every_operator_has_a_page() {
        for operator in DeclaredOperator::ALL {
            let inference = *operator == DeclaredOperator::FusedInferAttentionScore;
            assert!(operator.page().is_some() != inference, "{operator:?}");
        }
    }
}
