//! The order of the rules, and the resolution of a call that holds them or is only measured.

use super::resolve::{Verdict, resolve};
use super::routing::Routing;
use super::rules::api_layer::Progress;
use super::rules::{
    Facts, antiquant, api_layer, ascend950, entry, heads, lengths, lists, mask, mla, mla_quantised, output, packed,
    padding, paged, prefix, pse, quant, sink, split_fuse, unified,
};
use super::{Cache, CheckedCall, Checker, FiaCall, Route, Version};
use crate::attention_problem::{AttentionProblem, MaskUse, Work};
use crate::layout::Extents;
use crate::rule::require;
use crate::{Cann, DType, Layout, Level, SparseMode, Target, TensorDesc, Violation};

impl<'a> FiaCall<'a> {
    /// Checks the call against the contract of `version` for `target`, and resolves it.
    ///
    /// Allocates nothing unless it refuses. [`FiaCall::taken_by`] finds a target that takes a refused call.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule, or [`UNSUPPORTED`](crate::UNSUPPORTED) for what this crate does not
    /// compute.
    pub fn check(&'a self, version: Version, target: Target) -> Result<CheckedCall<'a>, Violation> {
        self.check_rules(version, target).map_err(|violation| self.try_fix(violation, version, target))
    }

    /// Tries the changes of a violation. They are dropped, and the fix is the rule's own, if the changed call breaks
    /// the same rule again, breaks any rule where the violation is of a lint, or is unsupported.
    pub(super) fn try_fix(&self, mut violation: Violation, version: Version, target: Target) -> Violation {
        if violation.changes.is_empty() {
            return violation;
        }
        let mends = match self.to_arguments().changed(&violation.changes) {
            Err(_) => false,
            Ok(changed) => match changed.call().check_rules(version, target) {
                Ok(_) => true,
                Err(next) => {
                    !next.is_unsupported() && violation.rule.level == Level::Rule && next.rule != violation.rule
                }
            },
        };
        if !mends {
            violation.changes.clear();
            violation.fix = violation.rule.fix.to_owned();
        }
        violation
    }

    /// As [`FiaCall::check`], but the changes of a fix are not tried.
    fn check_rules(&'a self, version: Version, target: Target) -> Result<CheckedCall<'a>, Violation> {
        if !api_layer::applies(version, target) {
            return self.check_behind_api_layer(version, target);
        }
        match api_layer::arguments(self)? {
            Progress::Ends => Ok(self.without_work(version, target)),
            Progress::GoesOn => self.check_behind_api_layer(version, target).map_err(api_layer::with_its_status),
        }
    }

    /// The verdict on a call that the API layer passes on.
    fn check_behind_api_layer(&'a self, version: Version, target: Target) -> Result<CheckedCall<'a>, Violation> {
        let facts = self.facts(version, target)?;
        if version == Version::V5 && target.cann >= Cann::V9_1 && !target.is_950() {
            // V5 checks strides, whichever checks follow. From 9.2 on the layer of V1 to V4 makes tensors contiguous.
            unified::lists::contiguous(&facts)?;
        }
        let verdict = match facts.checker {
            Checker::Prefill => {
                // FusedInferAttentionScore checks this before it enters the path; PromptFlashAttention, which shares
                // the path, does not.
                entry::several_rows(&facts)?;
                prefill(&facts)
            }
            Checker::Decode => decode(&facts),
            Checker::SplitFuse => split_fused(&facts),
            Checker::Unified => check_unified(&facts),
        }?;
        if api_layer::applies(version, target) {
            api_layer::outputs(&facts)?;
        }
        resolve(&facts, verdict)
    }

    /// A call that ends before anything of it is looked at, because its output is empty.
    fn without_work(&'a self, version: Version, target: Target) -> CheckedCall<'a> {
        let dtype = self.attention_out.map_or(DType::Float16, |out| out.dtype);
        CheckedCall {
            call: self,
            version,
            target,
            checker: Checker::Prefill,
            route: Route::Prefill,
            layout: Layout::parse(self.input_layout).unwrap_or(Layout::Bnsd),
            cache: None,
            axes_in_place: None,
            problem: AttentionProblem::blank(dtype),
        }
    }

    /// The verdict of the prefill or the decode path on the call, whichever path FusedInferAttentionScore would
    /// choose: each of the older operators has one of the two paths.
    pub(crate) fn verdict_of_path(&'a self, checker: Checker, target: Target) -> Result<Verdict, Violation> {
        let facts = self.facts_by(Version::V1, target, Some(checker))?;
        match checker {
            Checker::Decode => decode(&facts),
            _ => prefill(&facts),
        }
    }

    /// Resolves the call by a verdict of [`FiaCall::verdict_of_path`]. The verdict may be that of another call with the
    /// same work, mode and mask, whose head dimensions are padded.
    pub(crate) fn resolve_by(
        &'a self,
        verdict: Verdict,
        checker: Checker,
        target: Target,
    ) -> Result<CheckedCall<'a>, Violation> {
        let facts = self.facts_by(Version::V1, target, Some(checker))?;
        resolve(&facts, verdict)
    }

    /// Runs the first checks, and collects the facts that the later ones need.
    pub(super) fn facts(&'a self, version: Version, target: Target) -> Result<Facts<'a>, Violation> {
        self.facts_by(version, target, None)
    }

    fn facts_by(&'a self, version: Version, target: Target, checker: Option<Checker>) -> Result<Facts<'a>, Violation> {
        version.enter(target)?;
        let main = entry::main_tensors(self)?;
        entry::product(version, target)?;
        entry::types(self, &main, target)?;
        let layout = entry::layout(self, target)?;
        entry::countable(self, &main)?;
        let q = entry::query(self, layout, target, main.query)?;
        let kv_heads = heads::kv_heads(self);
        let nibbles = lists::nibbles(version, &main);
        let forgotten = entry::Remainder::Forgotten;
        let dim_of = |extents: Option<Extents>| extents.map_or(0, |extents| extents.dim);
        let dim = |desc: &TensorDesc| {
            if target.cann < Cann::V8_5 {
                // Before 8.5 no check reads it.
                return 0;
            }
            let dim = match (self.block_table.is_some(), &desc.shape[..]) {
                // The operator drops the remainder.
                (true, &[_, _, hidden]) if kv_heads > 0 => hidden / kv_heads,
                (true, shape) => dim_of(Cache::of_rank(shape.len()).and_then(|cache| cache.extents(desc, kv_heads))),
                (false, _) => dim_of(forgotten.extents(layout, desc, kv_heads)),
            };
            dim.saturating_mul(nibbles)
        };
        let routing = Routing {
            call: self,
            target,
            layout,
            query: main.query,
            key: main.key,
            q,
            key_dim: dim(main.key),
            value_dim: dim(main.value),
        };
        let checker = checker.unwrap_or_else(|| routing.checker(&main));
        if checker != Checker::Prefill {
            entry::divides(self, layout, main.query)?;
        }
        routing.null_lengths()?;
        let one_row = checker == Checker::Unified && routing.one_row();
        let single = one_row && !target.is_950();
        let route = match checker {
            Checker::Decode => Route::Decode,
            Checker::Unified if single => Route::Decode,
            _ => Route::Prefill,
        };
        // The unified checker takes several keys for a list, whatever else is given.
        let list = checker == Checker::Unified && self.key.len() > 1;
        let cache = match list {
            true => None,
            false => paged::cache(self, main.key, route)?,
        };
        let none = Extents { batch: 0, heads: 0, rows: 0, dim: 0 };
        let remainder = match checker == Checker::Prefill && target.cann >= Cann::V8_5 {
            true => entry::Remainder::Forgotten,
            false => entry::Remainder::Refused,
        };
        let lying = |cache: Option<Cache>, desc: &TensorDesc| match cache {
            Some(cache) => cache.extents(desc, kv_heads),
            None => remainder.extents(layout, desc, kv_heads),
        };
        // In the decode path the value may have other axes than the key.
        let value_cache = match (cache, checker) {
            (Some(_), Checker::Decode) => Cache::of_rank(main.value.shape.rank()).or(cache),
            _ => cache,
        };
        let counted = |cache, desc| {
            let extents = lying(cache, desc)?;
            let dim = extents.dim.saturating_mul(nibbles);
            Some(Extents { dim, ..extents })
        };
        if cache.is_none() && checker != Checker::Unified {
            lists::rank(layout, main.key, main.value)?;
        }
        let batch = if layout.is_packed() { packed::batch(self) } else { q.batch };
        let kv_list = match checker {
            Checker::Unified => list,
            _ => lists::is_list(self, layout, batch, route, main.key),
        };
        let prefix = self.key_shared_prefix.as_ref();
        let prefix = prefix.and_then(|desc| lying(cache, desc));
        Ok(Facts {
            call: self,
            version,
            query: main.query,
            key: main.key,
            value: main.value,
            out: main.out,
            layout,
            target,
            checker,
            single,
            one_row,
            route,
            batch,
            q,
            kv_heads,
            nibbles,
            cache,
            k: counted(cache, main.key).unwrap_or(none),
            v: match counted(value_cache, main.value) {
                Some(extents) => extents,
                // The split-fuse path drops the remainder of the last axis.
                None if checker == Checker::SplitFuse => Extents { dim: routing.value_dim, ..none },
                None => none,
            },
            kv_list,
            key_rows: match cache {
                Some(_) => paged::capacity(self),
                None => lists::longest(self, layout, kv_list),
            },
            prefix: prefix.map_or(0, |extents| extents.rows),
        })
    }
}

/// The path of several query rows a sequence.
fn prefill(f: &Facts<'_>) -> Result<Verdict, Violation> {
    let unmasked = (SparseMode::DefaultMask, MaskUse::None);
    entry::old_layout(f)?;
    output::dtype(f)?;
    output::shape(f)?;
    output::lse(f)?;
    sink::check(f)?;
    mla::prefill_layout(f)?;
    entry::prefill_layout(f.layout)?;
    packed::no_bias(f)?;
    if entry::empty_query(&main_tensors(f), f.route, false)? {
        return Ok((Work::Nothing, unmasked.0, unmasked.1));
    }
    if !f.packed() && (f.k.dim, f.v.dim) != (f.q.dim, f.q.dim) {
        // INT32 beside INT4 is found here first.
        lists::dtypes(f)?;
        heads::equal_dims(f)?;
    }
    heads::dim_max(f)?;
    if lists::empty(f)? {
        quant::filled(f)?;
        return Ok((Work::Fill, unmasked.0, unmasked.1));
    }
    output::precision(f)?;
    entry::query_scale(f.call, true)?;
    heads::counts(f)?;
    heads::dim(f)?;
    lists::dtypes(f)?;
    if !f.paged() {
        heads::key_value(f)?;
    }
    lists::shapes(f)?;
    lists::batch(f)?;
    padding::prefill(f)?;
    prefix::check(f)?;
    mla::prefill(f)?;
    if f.packed() {
        packed::prefill(f)?;
    } else {
        lengths::query(f)?;
        lengths::key(f)?;
    }
    paged::prefill(f)?;
    quant::prefill(f)?;
    if f.antiquant() {
        antiquant::prefill(f)?;
    } else {
        antiquant::none_prefill(f)?;
    }
    pse::check(f)?;
    let (mode, usage) = mask::check(f)?;
    Ok((Work::Attend, mode, usage))
}

/// The path of one query row a sequence, and of the absorbed form.
fn decode(f: &Facts<'_>) -> Result<Verdict, Violation> {
    entry::old_layout(f)?;
    output::dtype(f)?;
    output::shape(f)?;
    sink::check(f)?;
    mla::decode_ropes(f)?;
    entry::empty_query(&main_tensors(f), f.route, false)?;
    let full_quant = f.query.dtype == DType::Int8 && f.rope();
    if mla::is_for_newer_checker(f) || full_quant {
        if full_quant {
            mla_quantised::full_quant(f)?;
            if mla_quantised::tree(f) {
                return Ok((Work::Attend, SparseMode::Tree, mla_quantised::tree_use(f)));
            }
        } else {
            mla::absorbed(f)?;
        }
        let usage = match f.call.mask() {
            Some(_) => MaskUse::Compressed,
            None => MaskUse::None,
        };
        let mode = SparseMode::from_acl(f.call.mode()).unwrap_or(SparseMode::DefaultMask);
        return Ok((Work::Attend, mode, usage));
    }
    if paged::unchecked(f.call, f.key) {
        paged::unchecked_layout(f)?;
        return Ok((Work::Attend, SparseMode::DefaultMask, MaskUse::None));
    }
    if f.rope() && f.antiquant() {
        mla_quantised::antiquant(f)?;
    }
    entry::query_scale(f.call, f.antiquant())?;
    heads::counts(f)?;
    heads::dim(f)?;
    antiquant::decode_dim(f)?;
    lists::dtypes(f)?;
    if !f.paged() {
        heads::key_value(f)?;
        heads::equal_dims(f)?;
    }
    lists::shapes(f)?;
    lists::batch(f)?;
    output::precision(f)?;
    padding::decode(f)?;
    prefix::check(f)?;
    paged::decode(f)?;
    lengths::key(f)?;
    quant::decode(f)?;
    antiquant::decode(f)?;
    pse::check(f)?;
    let (mode, usage) = mask::check(f)?;
    let empty = f.key.is_empty() || f.value.is_empty();
    let work = if empty { Work::Fill } else { Work::Attend };
    Ok((work, mode, usage))
}

/// The split-fuse path.
fn split_fused(f: &Facts<'_>) -> Result<Verdict, Violation> {
    let (mode, usage) = split_fuse::check(f)?;
    Ok((Work::Attend, mode, usage))
}

/// Checks by the unified checker: what is given, then each feature, then all of it together.
fn check_unified(f: &Facts<'_>) -> Result<Verdict, Violation> {
    use unified::{features, form, lengths, lists, masks, output, pages, quant, rope};
    let nothing = |work| Ok((work, SparseMode::DefaultMask, MaskUse::None));
    form::counts(f)?;
    lists::counted(f)?;
    features::bias_type(f)?;
    ascend950::by_block(f)?;
    if entry::empty_query(&main_tensors(f), Route::Prefill, true)? {
        return nothing(Work::Nothing);
    }
    output::lse_given(f)?;
    if lists::empty(f) {
        if f.target.is_950() {
            features::filled(f)?;
        }
        return nothing(Work::Fill);
    }
    lists::ranks(f)?;
    if !lists::made_contiguous(f) {
        lists::contiguous(f)?;
    }
    rope::paired(f)?;
    form::layout(f)?;
    lists::dtypes(f)?;
    output::precision(f)?;
    quant::left_over(f)?;
    lists::batch(f)?;
    lists::shapes(f)?;
    form::dims(f)?;
    output::shape(f)?;
    rope::check(f)?;
    lengths::check(f)?;
    pages::check(f)?;
    if f.target.is_950() {
        ascend950::check(f)?;
    }
    features::left_padding(f)?;
    features::shared_prefix(f)?;
    features::bias(f)?;
    features::learnable_sink(f)?;
    quant::output(f)?;
    output::lse(f)?;
    let (mode, usage) = masks::check(f)?;
    Ok((Work::Attend, mode, usage))
}

fn main_tensors<'a>(f: &Facts<'a>) -> entry::MainTensors<'a> {
    entry::MainTensors { query: f.query, key: f.key, value: f.value, out: f.out }
}

/// Arrays that stand for those of a measured call: with as many entries, and with values that hold the rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnreadLengths {
    /// In place of `actualSeqLengths`.
    pub actual_seq_lengths: Option<Vec<i64>>,
    /// In place of `actualSeqLengthsKv`.
    pub actual_seq_lengths_kv: Option<Vec<i64>>,
    /// In place of `actualSharedPrefixLen`.
    pub actual_shared_prefix_len: Option<Vec<i64>>,
}

impl FiaCall<'_> {
    /// The arrays with which a measured call is checked. The operator does not see the contents of the call's own
    /// arrays, so these hold values that no rule on values, masks or block tables refuses: the ends of evenly
    /// distributed packed rows, otherwise 0.
    ///
    /// # Errors
    /// The broken rule, if the release measures no such call, or if tensors and attributes alone break one.
    pub fn unread_lengths(&self, version: Version, target: Target) -> Result<UnreadLengths, Violation> {
        let f = self.facts(version, target)?;
        let given = self.actual_seq_lengths.is_some() || self.actual_seq_lengths_kv.is_some();
        require!(
            for target => !(given && f.packed() && f.checker == Checker::Prefill),
            packed::DATA,
            "arrays without values",
            "GetWorkspaceSize, which passes them on",
        );
        let zeros = |values: Option<&[i64]>| Some(vec![0; values?.len()]);
        let ends = |values: Option<&[i64]>, rows| Some(shared_out(rows, values?.len()));
        let (q, kv) = (self.actual_seq_lengths, self.actual_seq_lengths_kv);
        Ok(UnreadLengths {
            actual_seq_lengths: match f.packed() {
                true => ends(q, f.q.rows),
                false => zeros(q),
            },
            actual_seq_lengths_kv: match f.packed() && !f.paged() {
                true => ends(kv, f.k.rows),
                false => zeros(kv),
            },
            actual_shared_prefix_len: zeros(self.actual_shared_prefix_len),
        })
    }
}

/// Ends of `sequences` sequences over `rows` rows, whose lengths differ by at most one.
fn shared_out(rows: i64, sequences: usize) -> Vec<i64> {
    let count = i128::try_from(sequences).unwrap_or(i128::MAX).max(1);
    let end = |b: i128| i64::try_from(i128::from(rows) * b / count).unwrap_or(rows);
    (1..=count).map(end).take(sequences).collect()
}

#[cfg(test)]
mod tests {
    use super::shared_out;

    #[test]
    fn rows_are_shared_out_evenly_and_completely() {
        assert_eq!(shared_out(7, 3), [2, 4, 7]);
        assert_eq!(shared_out(2, 4), [0, 1, 1, 2]);
        assert_eq!(shared_out(0, 2), [0, 0]);
        assert_eq!(shared_out(i64::MAX, 1), [i64::MAX]);
        assert_eq!(shared_out(9, 0), [0; 0]);
    }
}
