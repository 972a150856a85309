//! Steps without graphs: the first layer of each kind plans for the rest.

use ascend_attention::attention::BlockTable;
use ascend_attention::{Element, Stream, Tensor, Violation};

use crate::backends::{LatentForm, LayerInputs, LayerTensors, PreferredPlan, StepContext, output_shape};
use crate::batch::{AttentionMetadata, AttentionState, LayerMask};
use crate::error::{Error, Result};
use crate::kv::{CacheWrite, QueuedLayers, no_layer};
use crate::rules;

use super::layer_check::{InputKinds, check_layer, check_output};
use super::layer_group::{LayerGroup, LayerPlace};
use super::linear_step::LinearStep;

/// The layers of a step without graphs.
#[derive(Debug)]
pub(super) struct PlannedLayers<'a, T: Element> {
    pub(super) groups: Vec<GroupStep<'a, T>>,
    pub(super) linear: LinearStep<'a, T>,
}

/// What the layers of a group share in a step.
#[derive(Debug)]
pub(super) struct GroupStep<'a, T: Element> {
    pub(super) layers: &'a mut LayerGroup<T>,
    metadata: &'a AttentionMetadata,
    /// The metadata of layers that share keys in a step whose other layers read no cache.
    cached: Option<AttentionMetadata>,
    block_table: BlockTable,
    /// The write that the first layer has prepared for all layers.
    write: Option<CacheWrite>,
    planned: Vec<LayerPlan<T>>,
    /// For each layer of the group the number of its plan.
    plan_of: Vec<Option<usize>>,
    /// For each layer that is queued where its key and value are.
    keys_of: Vec<Option<[usize; 2]>>,
}

/// The plan of the layers that have the same mask and scale, make the step one of the same kind and prefer the same
/// backend.
#[derive(Debug)]
struct LayerPlan<T: Element> {
    mask: LayerMask,
    scale: f64,
    state: AttentionState,
    shares_keys: bool,
    plan: PreferredPlan<T>,
    /// Those of the first of the layers.
    input_kinds: InputKinds,
}

impl<'a, T: Element> PlannedLayers<'a, T> {
    /// Queues a layer of attention: writes its keys and values, unless it shares those of another layer, and attends.
    pub(super) fn queue_attention(
        &mut self,
        stream: &Stream,
        (layer, place): (usize, LayerPlace),
        inputs: &LayerInputs<'_, T>,
        into: Option<&Tensor<T>>,
        queued: &mut QueuedLayers,
    ) -> Result<Tensor<T>> {
        let groups = self.groups.len();
        let group = self.groups.get_mut(place.group).ok_or_else(|| no_layer(place.group, groups))?;
        group.queue_layer(stream, (layer, place), inputs, into, queued).map_err(|why| of_model(why, layer, place))
    }

    /// The plan of a layer, and not that of layers that share its keys.
    pub(super) fn plan(&self, place: LayerPlace) -> Option<&PreferredPlan<T>> {
        let group = self.groups.get(place.group)?;
        let planned = (*group.plan_of.get(place.layer)?)?;
        Some(&group.planned.get(planned)?.plan)
    }
}

/// A refusal of a layer that is known by its number in the cache, with that in the model.
fn of_model(mut why: Error, layer: usize, place: LayerPlace) -> Error {
    if let Error::Violation(violation) = &mut why
        && place.layer != layer
    {
        let of_model = format!(", in layer {layer} of the model, number {} of its group", place.layer);
        violation.given.push_str(&of_model);
    }
    why
}

impl<'a, T: Element> GroupStep<'a, T> {
    pub(super) fn new(layers: &'a mut LayerGroup<T>, metadata: &'a AttentionMetadata, block_table: BlockTable) -> Self {
        let count = layers.cache.shape().layers;
        Self {
            layers,
            metadata,
            cached: None,
            block_table,
            write: None,
            planned: Vec::new(),
            plan_of: vec![None; count],
            keys_of: vec![None; count],
        }
    }

    fn queue_layer(
        &mut self,
        stream: &Stream,
        (layer, place): (usize, LayerPlace),
        inputs: &LayerInputs<'_, T>,
        into: Option<&Tensor<T>>,
        queued: &mut QueuedLayers,
    ) -> Result<Tensor<T>> {
        let Self { layers, metadata, cached, block_table, write, planned, plan_of, keys_of } = self;
        let &LayerInputs { query, key, value, learnable_sink, latent, shares_keys, .. } = inputs;
        let keys = [key, value].map(|tensor| tensor.as_raw().addr());
        let written = keys_of.get(place.layer).copied().flatten();
        if shares_keys && written != Some(keys) {
            let given = format_args!("shared keys of layer {layer} in other tensors than it was queued with");
            return Err(rules::STEP_SHARED_KEYS.broken(given, "the same key and value").into());
        }
        let slots = metadata.slots();
        let metadata = match shares_keys {
            false => *metadata,
            true if metadata.state().reads_cache() => *metadata,
            true => cached.get_or_insert_with(|| {
                let mut cached = metadata.clone();
                cached.read_cache();
                cached
            }),
        };
        let mask = inputs.mask.unwrap_or(metadata.mask());
        let shape = layers.shape_of(place.layer);
        let context = StepContext { stream, shape, metadata, mask, block_table, recorded: false, shares_keys };
        // Clones of the handles, since writing borrows the cache mutably.
        let (layer_cache, quantised) = layers.cache.tensors(place.layer)?;
        if shares_keys {
            check_cached_latents(layer, latent.map(|latent| latent.form), quantised.is_some())?;
        }
        let tensors = LayerTensors {
            layer: place.layer,
            query,
            key,
            value,
            cache: &layer_cache,
            quantised: quantised.as_ref(),
            learnable_sink,
            latent,
        };
        check_layer(&context, &tensors)?;
        if let Some(output) = into {
            let mut planned = output_shape(&tensors);
            if latent.is_none() {
                planned[2] = layers.cache.shape().value_dim;
            }
            check_output("output", output, (stream.device(), &planned), [])?;
        }
        tensors.check_outputs(into)?;
        let preferred = layers.backends.preferred(place.layer, metadata.state());
        let state = metadata.state();
        let is_own = |known: &LayerPlan<T>| {
            let fits = match shares_keys {
                true => !known.plan.selected.plan.reads_own_keys(),
                false => !known.shares_keys,
            };
            let is_alike = known.mask == *mask && known.scale == shape.scale && known.state == state;
            fits && is_alike && known.plan.preferred == preferred
        };
        let at = match planned.iter().position(is_own) {
            Some(at) => at,
            None => {
                layers.check_mask(mask)?;
                metadata.check_mask(mask)?;
                let at = planned.len();
                let input_kinds = InputKinds::of(&tensors);
                let counts = (layers.cache.shape().layers, layers.scale_count());
                let plans = layers.backends.plan_layers(&context, &tensors, counts)?;
                // That of this layer is the first of them.
                let (mask, scale) = (mask.clone(), shape.scale);
                let of_layers = |plan| LayerPlan { mask: mask.clone(), scale, state, shares_keys, plan, input_kinds };
                planned.extend(plans.into_iter().map(of_layers));
                at
            }
        };
        if let Some(plan) = plan_of.get_mut(place.layer).filter(|_| !shares_keys) {
            *plan = Some(at);
        }
        let planned = &planned[at];
        planned.input_kinds.check_same(&tensors)?;
        let cache = &mut layers.cache;
        if !shares_keys {
            let write = match write {
                Some(write) => write,
                None => write.insert(CacheWrite::plan(cache, stream, slots, key, value)?),
            };
            queued.begin_write();
            let mut torn = false;
            let written = cache.write_layer(stream, write, place.layer, [key, value], &mut torn);
            if torn {
                queued.lose_group(place.group);
            }
            written?;
            if let Some(known) = keys_of.get_mut(place.layer) {
                *known = Some(keys);
            }
        }
        let plan = &planned.plan.selected.plan;
        let Some(output) = into else {
            return plan.launch(stream, &tensors);
        };
        plan.launch_into(stream, &tensors, &mut output.clone())?;
        Ok(output.clone())
    }
}

/// Refuses shared latents that the queries of a layer read elsewhere than in the cache: plain queries, and those of
/// mixed steps, project the step's own.
fn check_cached_latents<T: Element>(
    layer: usize,
    form: Option<LatentForm<'_, T>>,
    is_quantised: bool,
) -> Result<(), Violation> {
    let form = match form {
        None | Some(LatentForm::Absorbed | LatentForm::Quantised(_)) => return Ok(()),
        Some(form) => form.kind(),
    };
    let fix = match is_quantised {
        false => {
            "absorb the queries of layers that share latents (`LatentForm::Absorbed`), or give the layer latents of \
             its own"
        }
        true => {
            "absorb the queries of layers that share latents, and quantise them (`LayerInputs::quantised_latent`), or \
             give the layer latents of its own"
        }
    };
    Err(Violation::new(
        &rules::STEP_SHARED_KEYS,
        format_args!("shared latents of layer {layer} for queries in the form {form:?}"),
        "absorbed queries, which read latents from the cache",
        fix,
    ))
}
