//! Queries over all operators: every rule, and which functions a release exports.

use crate::declared::DeclaredOperator;
use crate::{Cann, Rule};

/// Every rule and lint of every operator, and of ATB's attention, which is no operator of `aclnn`.
pub fn every_rule() -> impl Iterator<Item = &'static Rule> {
    let atb = crate::ops::atb_attention::rules::RULES.iter().copied();
    DeclaredOperator::ALL.iter().flat_map(|operator| operator.rules()).chain(atb)
}

/// Whether the libraries of a release export a function. The answer is true for functions of no operator, and, for
/// operators added after 8.1 in an unknown release, for every release.
pub fn is_exported(function: &str, cann: Cann) -> bool {
    let mut known = DeclaredOperator::ALL.iter().filter_map(|operator| operator.exported(function, cann));
    known.next().unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::DescribedOperator;
    use crate::operator::{DeclaredParameter, DeclaredVersion, EntryPoint};
    use crate::ops::for_each_operator;

    #[test]
    fn ids_are_unique_over_all_operators() {
        let mut ids: Vec<_> = every_rule().map(|rule| rule.id).collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }

    #[test]
    fn functions_of_training_attention_are_exported_by_release() {
        let since = |function: &str| {
            let releases = Cann::ALL.into_iter();
            let releases = releases.filter(|cann| is_exported(function, *cann));
            releases.collect::<Vec<_>>()
        };
        let all = Cann::ALL.as_slice();
        let name = |kind: &str| format!("aclnnFlashAttention{kind}GetWorkspaceSize");
        assert_eq!(since(&name("Score")), all);
        assert_eq!(since(&name("VarLenScoreV4")), all);
        assert_eq!(since(&name("ScoreV3")), all[1..]);
        assert_eq!(since(&name("VarLenScoreV5")), all[1..]);
        assert_eq!(since(&name("ScoreV4")), all[2..]);
        assert_eq!(since("aclnnFlashAttentionScoreV4"), all[2..]);
        let measures = "aclnnFlashAttentionVarLenScoreV5GetMaxWorkspaceSize";
        assert_eq!(since(measures), all[3..]);
        assert_eq!(since("aclnnQuantFlashAttentionScore"), [Cann::V9_0]);
    }

    fn rules_name_their_operator<O: DescribedOperator>() {
        for rule in O::rules() {
            let mut versions = O::Version::ALL.iter();
            assert!(versions.any(|version| Some(version.info()) == rule.since), "{}", rule.id);
        }
    }

    fn names_and_numbers_are_unique<O: DescribedOperator>() {
        let (mut names, mut inputs, mut outputs) = (vec![], vec![], vec![]);
        let newest = EntryPoint::<O::Parameter>::Version(u8::MAX);
        for &parameter in O::Parameter::ALL {
            let info = parameter.info();
            assert_eq!(O::Parameter::from_name(info.name), Some(parameter));
            let letters = info.name.replace('_', "");
            let acl = info.acl_name.to_ascii_lowercase();
            let acl = acl.strip_suffix("ref").unwrap_or(&acl);
            // Named as in the other operators of the family, or without what says that it is an output.
            let renamed = ["scaleValue", "headNum", "actualSeqQLen", "actualSeqKvLen", "yOut", "rstdOut", "gOptional"];
            assert!(acl == letters || renamed.contains(&info.acl_name), "{acl}");
            names.push(info.name);
            inputs.extend(info.input);
            outputs.extend(info.output);
            assert_eq!(info.input.and_then(O::Parameter::of_input), info.input.map(|_| parameter));
            assert_eq!(info.output.and_then(|number| newest.output(number)), info.output.map(|_| parameter));
        }
        assert!(inputs.into_iter().eq(0..newest.inputs()));
        assert!(outputs.into_iter().eq(0..newest.outputs()));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), O::Parameter::ALL.len());
    }

    macro_rules! checks {
        ($($operator:ident: $module:ident, $name:expr, $page:expr;)*) => {
            #[test]
            fn a_rule_names_its_operator() {
                $(rules_name_their_operator::<crate::ops::$module::$operator>();)*
            }

            #[test]
            fn parameters_are_named_and_numbered_once() {
                $(names_and_numbers_are_unique::<crate::ops::$module::$operator>();)*
            }
        };
    }

    for_each_operator! { checks }
}
