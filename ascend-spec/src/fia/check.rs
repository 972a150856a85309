//! The order of the rules, and the resolution of a call that holds them.

use super::rules::{Facts, entry, heads, lengths, mask, output, tensors};
use super::{FiaCall, Problem, Route, Version, Work};
use crate::fia::MaskUse;
use crate::layout::Extents;
use crate::{Axes, DType, Refusal, Soc, SparseMode, TensorDesc, View};

impl<'a> FiaCall<'a> {
    /// Checks the call against the contract of `version` on `soc`, and resolves it.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Refusal::Violation`] with the first broken rule, or [`Refusal::Unsupported`] for what this release does not
    /// compute.
    pub fn check(&'a self, version: Version, soc: Soc) -> Result<Problem<'a>, Refusal> {
        let at = entry::operands(self)?;
        entry::product(version, soc)?;
        entry::types(self, &at)?;
        let layout = entry::layout(self)?;
        entry::supported(self, layout)?;
        entry::countable(self, &at)?;
        let (query, route) = entry::query(self, layout, at.query)?;
        let resolve = Resolve {
            call: self,
            layout_query: query,
            route,
            out: at.out,
        };
        output::dtype(&at)?;
        tensors::rank(layout, &at)?;
        let kv_heads = heads::kv_heads(self);
        let extents = |desc: &TensorDesc| {
            let none = Extents {
                batch: 0,
                heads: 0,
                rows: 0,
                dim: 0,
            };
            layout
                .input()
                .extents(&desc.shape, kv_heads)
                .unwrap_or(none)
        };
        let value_dim = extents(at.value).dim;
        output::shape(layout, route, query, &at, value_dim)?;
        output::lse(self, layout, route, query)?;
        if entry::empty_query(&at, route)? {
            return Ok(resolve.problem(layout, Work::Nothing, value_dim, None));
        }
        heads::equal_dims(query, extents(at.key).dim, value_dim)?;
        // The prefill path leaves here; the decode path checks everything first.
        let empty = at.key.is_empty() || at.value.is_empty();
        if empty && route == Route::Prefill {
            return Ok(resolve.problem(layout, Work::Fill, value_dim, None));
        }
        heads::counts(self, query, route)?;
        heads::dim(query, route, layout)?;
        let kv_list = tensors::is_list(self, query.batch, route, at.key);
        tensors::dtypes(self, &at, kv_list)?;
        let facts = Facts {
            layout,
            route,
            query,
            key: extents(at.key),
            kv_list,
            key_rows: tensors::longest(self, layout, kv_list),
        };
        tensors::shapes(self, &facts, &at)?;
        tensors::batch(&facts)?;
        output::precision(self, route)?;
        lengths::query(self, &facts)?;
        lengths::key(self, &facts)?;
        let masked = mask::check(self, &facts)?;
        let work = if empty { Work::Fill } else { Work::Attend };
        Ok(resolve.problem(layout, work, value_dim, Some((facts, masked))))
    }
}

/// What a problem is made of.
struct Resolve<'a> {
    call: &'a FiaCall<'a>,
    layout_query: Extents,
    route: Route,
    out: &'a TensorDesc,
}

impl<'a> Resolve<'a> {
    fn problem(
        &self,
        layout: crate::Layout,
        work: Work,
        value_dim: i64,
        attend: Option<(Facts, (SparseMode, MaskUse))>,
    ) -> Problem<'a> {
        let query = self.layout_query;
        let facts = attend.map(|(facts, _)| facts);
        let (mode, mask) = attend
            .map_or((SparseMode::DefaultMask, MaskUse::None), |(_, masked)| {
                masked
            });
        let out_extents = output::expected(query, value_dim);
        let out_dtype = self.out.dtype;
        let size = |value: i64| usize::try_from(value).unwrap_or(0);
        let lse = output::written_lse(self.call).map(|lse| {
            let packed = TensorDesc::packed(DType::Float, layout.lse_shape(query));
            let desc = if lse.shape == packed.shape && lse.dtype == DType::Float {
                *lse
            } else {
                packed
            };
            view(layout.lse_axes(), &desc, 1)
        });
        let out = TensorDesc::packed(out_dtype, layout.out_shape(out_extents));
        let out = if self.out.shape == out.shape {
            *self.out
        } else {
            out
        };
        Problem {
            call: self.call,
            work,
            route: self.route,
            layout,
            batch: size(query.batch),
            heads: size(query.heads),
            kv_heads: size(heads::kv_heads(self.call)),
            query_rows: size(query.rows),
            key_rows: size(facts.map_or(0, |facts| facts.key_rows)),
            head_dim: size(query.dim),
            value_dim: size(value_dim),
            mode,
            mask,
            query: self
                .call
                .query
                .as_ref()
                .map_or(view(layout.input(), &out, 0), |desc| {
                    view(layout.input(), desc, query.dim)
                }),
            out: view(layout.output(), &out, value_dim),
            lse,
            kv_list: facts.is_some_and(|facts| facts.kv_list),
            query_dtype: self
                .call
                .query
                .as_ref()
                .map_or(out_dtype, |desc| desc.dtype),
            out_dtype,
        }
    }
}

/// A view whose rank the rules have checked.
fn view(axes: Axes, desc: &TensorDesc, dim: i64) -> View {
    axes.view(desc, dim).unwrap_or(View {
        offset: 0,
        batch: 0,
        head: 0,
        row: 0,
        dim: 0,
    })
}
