//! The order of the rules, and the resolution of a call that holds them.

use super::resolve::{Verdict, resolve};
use super::rules::{
    Facts, antiquant, entry, heads, lengths, lists, mask, mla, mla_antiquant, mla_int8, output,
    packed, padding, paged, prefix, pse, quant, sink,
};
use super::{Cache, FiaCall, MaskUse, Problem, Route, Version, Work};
use crate::layout::Extents;
use crate::{DType, Refusal, Soc, SparseMode, TensorDesc};

impl<'a> FiaCall<'a> {
    /// Checks the call against the contract of `version` on `soc`, and resolves it.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Refusal::Violation`] with the first broken rule, or [`Refusal::Unsupported`] for what this release does not
    /// compute.
    pub fn check(&'a self, version: Version, soc: Soc) -> Result<Problem<'a>, Refusal> {
        let facts = self.facts(version, soc)?;
        let verdict = match facts.route {
            Route::Prefill => prefill(&facts),
            Route::Decode => decode(&facts),
        }?;
        Ok(resolve(&facts, verdict)?)
    }

    /// First checks, and what the rest needs to know.
    fn facts(&'a self, version: Version, soc: Soc) -> Result<Facts<'a>, Refusal> {
        let at = entry::operands(self)?;
        entry::product(version, soc)?;
        entry::types(self, &at, soc)?;
        let layout = entry::layout(self)?;
        entry::countable(self, &at)?;
        let q = entry::query(self, layout, at.query)?;
        let route = entry::route(self, layout, q, &at);
        let kv_heads = heads::kv_heads(self);
        let cache = paged::cache(self, at.key, route)?;
        let none = Extents {
            batch: 0,
            heads: 0,
            rows: 0,
            dim: 0,
        };
        let nibbles = lists::nibbles(version, &at);
        let lying = |cache: Option<Cache>, desc: &TensorDesc| match cache {
            Some(cache) => paged::extents(cache, desc, kv_heads),
            None => layout.input().extents(&desc.shape, kv_heads),
        };
        // In the decode path the value may have other axes than the key.
        let value_cache = match (cache, route) {
            (Some(_), Route::Decode) => paged::of_rank(at.value.shape.rank()).or(cache),
            _ => cache,
        };
        let counted = |cache, desc| {
            let of = lying(cache, desc)?;
            let dim = of.dim.saturating_mul(nibbles);
            Some(Extents { dim, ..of })
        };
        if cache.is_none() {
            lists::rank(layout, at.key, at.value)?;
        }
        let batch = if layout.is_packed() {
            packed::batch(self)
        } else {
            q.batch
        };
        let kv_list = lists::is_list(self, layout, batch, route, at.key);
        let prefix = self.key_shared_prefix.as_ref();
        let prefix = prefix.and_then(|desc| lying(cache, desc));
        Ok(Facts {
            call: self,
            query: at.query,
            key: at.key,
            value: at.value,
            out: at.out,
            layout,
            route,
            batch,
            q,
            kv_heads,
            nibbles,
            cache,
            k: counted(cache, at.key).unwrap_or(none),
            v: counted(value_cache, at.value).unwrap_or(none),
            kv_list,
            key_rows: match cache {
                Some(_) => paged::capacity(self),
                None => lists::longest(self, layout, kv_heads, kv_list),
            },
            prefix: prefix.map_or(0, |of| of.rows),
        })
    }
}

/// The path of several query rows a sequence.
fn prefill(f: &Facts<'_>) -> Result<Verdict, Refusal> {
    let unmasked = (SparseMode::DefaultMask, MaskUse::None);
    output::dtype(f)?;
    output::shape(f)?;
    output::lse(f)?;
    sink::check(f)?;
    mla::prefill_layout(f)?;
    entry::prefill_layout(f.layout)?;
    packed::no_bias(f)?;
    if entry::empty_query(&operands(f), f.route)? {
        return Ok((Work::Nothing, unmasked.0, unmasked.1));
    }
    if !f.packed() && (f.k.dim, f.v.dim) != (f.q.dim, f.q.dim) {
        // INT32 beside INT4 shows here first.
        lists::dtypes(f)?;
        heads::equal_dims(f.q, f.k.dim, f.v.dim)?;
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
fn decode(f: &Facts<'_>) -> Result<Verdict, Refusal> {
    output::dtype(f)?;
    output::shape(f)?;
    sink::check(f)?;
    mla::decode_ropes(f)?;
    entry::empty_query(&operands(f), f.route)?;
    let full_quant = f.query.dtype == DType::Int8 && f.rope();
    if mla::unified(f) || full_quant {
        if full_quant {
            mla_int8::full_quant(f)?;
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
        mla_antiquant::antiquant(f)?;
    }
    entry::query_scale(f.call, f.antiquant())?;
    heads::counts(f)?;
    heads::dim(f)?;
    lists::dtypes(f)?;
    if !f.paged() {
        heads::key_value(f)?;
        heads::equal_dims(f.q, f.k.dim, f.v.dim)?;
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

fn operands<'a>(f: &Facts<'a>) -> entry::Operands<'a> {
    entry::Operands {
        query: f.query,
        key: f.key,
        value: f.value,
        out: f.out,
    }
}
