//! The calls of a rank in a layer whose rows are divided, and what goes from rank to rank before them.

use ascend_attention::attention::BlockTable;
use ascend_attention::comm::Communicator;
use ascend_attention::{CausalOrigin, Element, Mask, Output, Stream, Tensor};

use crate::backends::{AttentionShape, size};
use crate::error::Result;
use crate::graphs::zeros;
use crate::kv::{CacheShape, CacheWrite, CachedRows, PadPolicy, PagedKvCache};

use super::paged_rows::{PagedPlan, Queries};
use super::row_split::{GatheredTokens, RowSplit};

/// The calls of a step, prepared once for all layers, with the tensors between them, which one layer after the other
/// uses.
#[derive(Debug)]
pub(super) struct RowExchange<T: Element> {
    /// The keys and values of all ranks, in one layer.
    keys: PagedKvCache<T>,
    /// The tokens in front of the step, and those of them that the rank has.
    cached: Option<(CachedRows, GatheredRows<T>)>,
    new: GatheredRows<T>,
    /// The write of the gathered new tokens to the rank's own cache.
    write: CacheWrite,
    /// The call of the rank's rows, if it has any.
    call: Option<(PagedPlan, BlockTable)>,
}

/// Keys and values of some tokens of all ranks.
#[derive(Debug)]
struct GatheredRows<T: Element> {
    /// What the rank sends, filled up to the rows of the rank that has most; `None` where the rank has as many.
    sent: Option<[Tensor<T>; 2]>,
    /// What arrives, one rank's rows behind the other's; `None` for a single rank.
    gathered: Option<[Tensor<T>; 2]>,
    /// The write to the keys of all ranks.
    write: CacheWrite,
}

impl<T: Element> RowExchange<T> {
    /// Prepares the calls of a rank for layers like this one, whose heads `shape` has. Nothing is exchanged.
    pub(super) fn plan(
        stream: &Stream,
        shape: AttentionShape,
        (split, ranks): (&RowSplit, usize),
        cache: &PagedKvCache<T>,
        (queries, own): (Queries<'_, T>, [&Tensor<T>; 2]),
    ) -> Result<Self> {
        let pool = cache.pool();
        let CacheShape { kv_heads, key_dim, value_dim, .. } = cache.shape();
        let one = CacheShape::new(1, kv_heads, key_dim).value_dim(value_dim);
        let keys = PagedKvCache::new(stream.device(), split.blocks, pool.block_size(), one, PadPolicy::default())?;
        let cached = match &split.cached {
            None => None,
            Some((tokens, held)) => {
                Some((held.clone(), GatheredRows::plan(stream, (tokens, ranks), &keys, (own, true))?))
            }
        };
        let is_short = size(own[0], 0) < split.new.of_rank;
        let new = GatheredRows::plan(stream, (&split.new, ranks), &keys, (own, is_short))?;
        let [key, value] = new.all_rows(own);
        let write = CacheWrite::plan(cache, stream, &split.own_slots, key, value)?;
        let call = match split.table.requests() {
            0 => None,
            _ => {
                let table = keys.block_table(stream, &split.table)?;
                // A single row sees all keys of its row of the table.
                let mask = match split.rows.single {
                    true => Mask::none(),
                    false => stream.device().masks().causal(CausalOrigin::RightDown)?,
                };
                let plan = split.rows.plan(|layout| shape.call(layout).mask(mask), queries, keys.layer(0)?, &table)?;
                plan.map(|plan| (plan, table))
            }
        };
        Ok(Self { keys, cached, new, write, call })
    }

    /// Queues a layer: gathers the keys and values of all ranks, writes those of the rank to its cache, and attends.
    pub(super) fn launch(
        &mut self,
        communicator: &mut Communicator,
        stream: &Stream,
        (cache, layer): (&mut PagedKvCache<T>, usize),
        (queries, own): (Queries<'_, T>, [&Tensor<T>; 2]),
        output: &Tensor<T>,
        mark: &mut impl FnMut(&'static str) -> Result<()>,
    ) -> Result<()> {
        let Self { keys, cached, new, write, call } = self;
        if let Some((held, cached)) = cached {
            if let (Some(sent), false) = (&cached.sent, held.is_empty()) {
                let rows = |tensor: &Tensor<T>| {
                    let elements = size(tensor, 1) * size(tensor, 2);
                    tensor.narrow(0, 0..held.len())?.reshape([held.len(), elements])
                };
                cache.layer(layer)?.gather(stream, held, &rows(&sent[0])?, &rows(&sent[1])?)?;
            }
            cached.queue(communicator, stream, own, keys)?;
        }
        if let Some(sent) = &new.sent {
            for (sent, own) in sent.iter().zip(own).filter(|(_, own)| !own.is_empty()) {
                sent.narrow(0, 0..size(own, 0))?.copy_from(stream, own)?;
            }
        }
        new.queue(communicator, stream, own, keys)?;
        let [key, value] = new.all_rows(own);
        cache.write(stream, write, layer, key, value)?;
        mark("gather")?;
        if let Some((plan, table)) = call {
            let mut output = Output { attention: output.clone(), softmax_lse: None };
            plan.launch_into(stream, (queries, keys.layer(0)?, table), &mut output)?;
        }
        mark("attention")
    }
}

impl<T: Element> GatheredRows<T> {
    /// Prepares the exchange and the write; `own` are the rank's rows, which are `copied` to be sent or sent as they
    /// are.
    fn plan(
        stream: &Stream,
        (tokens, ranks): (&GatheredTokens, usize),
        keys: &PagedKvCache<T>,
        (own, copied): ([&Tensor<T>; 2], bool),
    ) -> Result<Self> {
        let CacheShape { kv_heads, key_dim, value_dim, .. } = keys.shape();
        let (device, dims) = (stream.device(), [key_dim, value_dim]);
        let sent = match copied {
            true => Some(both(dims, |dim| zeros(device, [tokens.of_rank, kv_heads, dim]))?),
            false => None,
        };
        // The exchange writes every row.
        let gathered = match ranks {
            1 => None,
            _ => Some(both(dims, |dim| Ok(Tensor::empty(device, [tokens.of_rank * ranks, kv_heads, dim])?))?),
        };
        let [key, value] = all_rows(&gathered, &sent, own);
        let write = CacheWrite::plan(keys, stream, &tokens.slots, key, value)?;
        Ok(Self { sent, gathered, write })
    }

    /// Where the rows of all ranks are, once they have arrived.
    fn all_rows<'a>(&'a self, own: [&'a Tensor<T>; 2]) -> [&'a Tensor<T>; 2] {
        all_rows(&self.gathered, &self.sent, own)
    }

    /// Queues the exchange and the write.
    fn queue(
        &self,
        communicator: &mut Communicator,
        stream: &Stream,
        own: [&Tensor<T>; 2],
        keys: &mut PagedKvCache<T>,
    ) -> Result<()> {
        let sent = self.sent.as_ref().map_or(own, |[key, value]| [key, value]);
        if let Some(gathered) = &self.gathered {
            for (sent, gathered) in sent.into_iter().zip(gathered) {
                communicator.all_gather(stream, sent, gathered)?;
            }
        }
        let [key, value] = self.all_rows(own);
        keys.write(stream, &self.write, 0, key, value)
    }
}

/// A tensor for keys and one for values, of heads with as many elements.
fn both<T: Element>([key, value]: [usize; 2], tensor: impl Fn(usize) -> Result<Tensor<T>>) -> Result<[Tensor<T>; 2]> {
    Ok([tensor(key)?, tensor(value)?])
}

/// Where the rows of all ranks are: where they arrive, or for a single rank what it would send.
fn all_rows<'a, T: Element>(
    gathered: &'a Option<[Tensor<T>; 2]>,
    sent: &'a Option<[Tensor<T>; 2]>,
    own: [&'a Tensor<T>; 2],
) -> [&'a Tensor<T>; 2] {
    gathered.as_ref().or(sent.as_ref()).map_or(own, |[key, value]| [key, value])
}
