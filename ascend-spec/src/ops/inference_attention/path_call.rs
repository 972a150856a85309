//! A call of an operator that is one path of FusedInferAttentionScore: the same attention as a call of that operator,
//! and how it is checked.

use crate::Cann::V8_1;
use crate::attention_problem::{AttentionProblem, TensorRole};
use crate::contract::first_lint;
use crate::operator::{Argument, ArgumentValues, DeclaredParameter, DeclaredVersion, Kind, OperatorVersion, Value};
use crate::ops::fused_infer_attention_score::{self as fia, CheckedCall, Checker, ContentBounds, FiaCall, Verdict};
use crate::rule::broken;
use crate::{PARAM_INVALID, Rule, Soc, Target, TensorDesc, Violation};

/// The target whose path's rules the operators have, on every product and in every release.
const TILING: Target = Target::snapshot(Soc::AtlasA2);

/// The first version that computes with a position bias. Those before take one and ignore it.
const BIAS_SINCE: u8 = 3;

/// The properties that all versions share: the products. Ascend 950 exports them and refuses every call.
pub(crate) const fn path_version(number: u8, symbol: &'static str) -> OperatorVersion {
    OperatorVersion::new(number, symbol, "8.1").on_a2_a3(V8_1).on_inference_cards(V8_1)
}

/// The rules of an operator that are asked in the same way for each. `path_rules!` declares all
/// but the last two.
#[derive(Debug)]
pub struct PathRules {
    pub(crate) successor: &'static Rule,
    pub(crate) product: &'static Rule,
    pub(crate) required: &'static Rule,
    pub(crate) pse_dropped: &'static Rule,
    pub(crate) deprecated: &'static Rule,
    /// The rule that a call breaks which breaks one of the path.
    pub(crate) path: &'static Rule,
    /// The rule that a call breaks whose types or formats the path refuses.
    pub(crate) registered: &'static Rule,
}

/// A call of an operator that is one path of FusedInferAttentionScore.
#[allow(private_interfaces, reason = "sealed by types that only this crate makes")]
pub trait PathCall: ArgumentValues<Tensor = TensorDesc> {
    /// The operator's versions.
    type Version: DeclaredVersion;

    /// The path.
    const CHECKER: Checker;
    /// The operator's rules that the path asks.
    const RULES: PathRules;
    /// The layout of calls that do not name one.
    const DEFAULT_LAYOUT: &'static str;

    /// The operator's parameter that stands for one of FusedInferAttentionScore; `None` if it has none.
    fn of_fused(parameter: fia::Parameter) -> Option<Self::Parameter>;

    /// The call as `version` computes it: arguments that the version does not have are set to their defaults, and so
    /// is the position bias that V1 and V2 take and ignore.
    fn computed_by(&self, version: Self::Version) -> Self;

    /// Checks the operator's own rules, and returns the path's verdict; `None` for a call that computes nothing.
    #[doc(hidden)]
    fn verdict(&self, target: Target) -> Result<Option<Verdict>, Violation>;

    /// Checks the tiling rules of 310P, by the sizes of the tensors.
    fn check_card(&self, problem: &AttentionProblem<'_>) -> Result<(), Violation>;

    /// The description of the mask that the path gets.
    fn path_mask(mask: TensorDesc) -> TensorDesc {
        mask
    }

    /// Whether a version has a parameter and computes with it: V1 and V2 take a position bias and ignore it.
    fn computes(version: Self::Version, parameter: Self::Parameter) -> bool {
        let since = match Self::of_fused(fia::Parameter::PseShift) == Some(parameter) {
            true => BIAS_SINCE,
            false => parameter.info().since,
        };
        since <= version.info().number()
    }

    /// The argument whose tensor plays a role; `None` for roles that the operator has no argument for.
    fn of_role(role: TensorRole) -> Option<Argument<Self::Parameter>> {
        let fused = fia::Argument::of_role(role)?;
        let parameter = Self::of_fused(fused.parameter)?;
        let is_given = fused.index == 0 || parameter.info().kind == Kind::TensorList;
        is_given.then(|| Argument::element(parameter, fused.index))
    }

    /// The argument that stands for a tensor of FusedInferAttentionScore, if it is given.
    fn fused_tensor(&self, parameter: fia::Parameter) -> Option<&TensorDesc> {
        self.tensors(Self::of_fused(parameter)?).first()
    }

    /// This call as a call of FusedInferAttentionScore that computes the same attention.
    fn as_fused(&self) -> FiaCall<'_> {
        use fia::Parameter as Fused;
        let value = |parameter| self.value(Self::of_fused(parameter)?);
        let tensor = |parameter| self.fused_tensor(parameter).copied();
        let list = |parameter| Self::of_fused(parameter).map_or(&[][..], |own| self.tensors(own));
        let ints = |parameter| match value(parameter) {
            Some(Value::Ints(ints)) => ints,
            _ => None,
        };
        let int = |parameter, default| match value(parameter) {
            Some(Value::Int(int)) => int,
            _ => default,
        };
        let layout = match value(Fused::InputLayout) {
            Some(Value::Text(Some(layout))) => layout,
            _ => Self::DEFAULT_LAYOUT,
        };
        let plain = FiaCall::new(layout);
        FiaCall {
            query: tensor(Fused::Query),
            key: list(Fused::Key),
            value: list(Fused::Value),
            pse_shift: tensor(Fused::PseShift),
            atten_mask: tensor(Fused::AttenMask).map(Self::path_mask),
            actual_seq_lengths: ints(Fused::ActualSeqLengths),
            actual_seq_lengths_kv: ints(Fused::ActualSeqLengthsKv),
            deq_scale1: tensor(Fused::DeqScale1),
            quant_scale1: tensor(Fused::QuantScale1),
            deq_scale2: tensor(Fused::DeqScale2),
            quant_scale2: tensor(Fused::QuantScale2),
            quant_offset2: tensor(Fused::QuantOffset2),
            antiquant_scale: tensor(Fused::AntiquantScale),
            antiquant_offset: tensor(Fused::AntiquantOffset),
            block_table: tensor(Fused::BlockTable),
            kv_padding_size: tensor(Fused::KvPaddingSize),
            num_heads: int(Fused::NumHeads, plain.num_heads),
            scale: match value(Fused::Scale) {
                Some(Value::Float(scale)) => scale,
                _ => plain.scale,
            },
            pre_tokens: int(Fused::PreTokens, plain.pre_tokens),
            next_tokens: int(Fused::NextTokens, plain.next_tokens),
            num_key_value_heads: int(Fused::NumKeyValueHeads, plain.num_key_value_heads),
            sparse_mode: int(Fused::SparseMode, plain.sparse_mode),
            inner_precise: int(Fused::InnerPrecise, plain.inner_precise),
            block_size: int(Fused::BlockSize, plain.block_size),
            attention_out: tensor(Fused::AttentionOut),
            ..plain
        }
    }

    /// A required argument.
    fn required<T>(argument: Option<T>, acl_name: &str) -> Result<T, Violation> {
        Self::RULES.required.requires(argument, acl_name)
    }

    /// The verdict of the path's rules on a call of FusedInferAttentionScore.
    fn judge_path(fused: &FiaCall<'_>) -> Result<Verdict, Violation> {
        fused.verdict_of_path(Self::CHECKER, TILING).map_err(Self::by_path)
    }

    /// A refusal of the path, as the operator reports it.
    fn by_path(violation: Violation) -> Violation {
        if violation.is_unsupported() {
            return violation;
        }
        let rule = match violation.rule.status {
            PARAM_INVALID => Self::RULES.registered,
            _ => Self::RULES.path,
        };
        broken(rule, format_args!("{}: {}", violation.rule.id, violation.given), violation.allowed, violation.fix)
    }

    /// Checks the call, and passes the checked call of the path to `then`: what the version reads of it, as a call of
    /// FusedInferAttentionScore; `None` for a call that computes nothing.
    fn resolve<T>(
        &self,
        version: Self::Version,
        target: Target,
        then: impl FnOnce(Option<CheckedCall<'_>>) -> T,
    ) -> Result<T, Violation> {
        let PathRules { successor, product, .. } = Self::RULES;
        if target.soc == Soc::Ascend950 && successor.scope.holds(target) {
            let allowed = "aclnnFusedInferAttentionScoreV5";
            return Err(successor.broken(version.info(), allowed));
        }
        if !version.info().runs_on(target) {
            let allowed = "Atlas A2, Atlas A3 and the Atlas inference series (310P)";
            return Err(product.broken(target.soc, allowed));
        }
        let call = self.computed_by(version);
        let Some(verdict) = call.verdict(target)? else {
            return Ok(then(None));
        };
        let fused = call.as_fused();
        let checked = fused.resolve_by(verdict, Self::CHECKER, TILING);
        let checked = checked.map_err(Self::by_path)?;
        if target.soc == Soc::AtlasInference {
            call.check_card(&checked.problem)?;
        }
        Ok(then(Some(checked)))
    }

    /// Reports each lint that a checked call breaks: those of the operator, then those of the path.
    fn lints(&self, version: Self::Version, checked: Option<&CheckedCall<'_>>, report: &mut dyn FnMut(Violation)) {
        let PathRules { pse_dropped, deprecated, .. } = Self::RULES;
        let version = version.info();
        let bias = self.fused_tensor(fia::Parameter::PseShift);
        if version.number() < BIAS_SINCE && bias.is_some() {
            report(pse_dropped.broken(format_args!("pseShift for {version}"), "null"));
        }
        if version.is_deprecated(TILING.cann)
            && let Some(kept) = Self::Version::preferred_on(TILING).next()
        {
            report(deprecated.broken(version, kept.info()));
        }
        if let Some(checked) = checked {
            checked.each_lint_of_path(report);
        }
    }

    /// Checks the call, reports each lint that it breaks once, and returns what the call computes.
    fn resolve_and_report(
        &self,
        version: Self::Version,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<Option<AttentionProblem<'static>>, Violation> {
        self.resolve(version, target, |checked| {
            let mut reported = Vec::new();
            self.lints(version, checked.as_ref(), &mut |lint| {
                if !reported.contains(&lint.rule.id) {
                    reported.push(lint.rule.id);
                    report(lint);
                }
            });
            checked.map(|checked| checked.problem.into_owned())
        })
    }

    /// The first lint that a call which holds every rule breaks, leaving out those in `allowed`, by id.
    fn first_lint(&self, version: Self::Version, allowed: &[&str]) -> Result<(), Violation> {
        first_lint(allowed, |report| {
            let resolved = self.resolve(version, TILING, |checked| {
                self.lints(version, checked.as_ref(), report);
            });
            if resolved.is_err() {
                self.lints(version, None, report);
            }
        })
    }

    /// Bounds of the block table and of the left padding, if the call has one.
    fn bounds(&self, version: Self::Version) -> Result<Option<ContentBounds>, Violation> {
        let positions = [fia::Parameter::BlockTable, fia::Parameter::KvPaddingSize];
        let mut positions = positions.into_iter();
        if positions.all(|parameter| self.fused_tensor(parameter).is_none()) {
            return Ok(None);
        }
        self.resolve(version, TILING, |checked| checked?.content_bounds())
    }

    /// Checks the contents of block table and left padding; `integers` returns those of a tensor by its name.
    fn admit_contents(&self, version: Self::Version, integers: &dyn Fn(&str) -> Vec<i64>) -> Result<(), Violation> {
        match self.bounds(version) {
            Ok(Some(bounds)) => {
                let table = self.fused_tensor(fia::Parameter::BlockTable);
                bounds.admits_contents(table, integers)
            }
            Err(violation) if !violation.is_unsupported() => Err(violation),
            Ok(None) | Err(_) => Ok(()),
        }
    }
}
