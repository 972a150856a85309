//! Which keys the tokens of a layer see, by one of the operator's masks or by a rule of the caller.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex};

use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::{Device, Mask, Violation};

use crate::causality::Causality;
use crate::error::Result;
use crate::rules;
use crate::sharing::lock;

/// Which keys the tokens of a layer see. A step has one
/// ([`AttentionMetadata::mask`](crate::AttentionMetadata::mask)), and a layer may have another
/// ([`LayerInputs::mask`](crate::LayerInputs::mask)).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayerMask {
    /// A mask that the operator has.
    Causality(Causality),
    /// A rule of the caller, for the backend [`Backend::NamedMask`](crate::Backend::NamedMask).
    Named(NamedMask),
}

impl fmt::Display for LayerMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Causality(causality) => write!(f, "{causality:?}"),
            Self::Named(mask) => write!(f, "the named mask {:?}", mask.name()),
        }
    }
}

impl From<Causality> for LayerMask {
    fn from(causality: Causality) -> Self {
        Self::Causality(causality)
    }
}

impl From<NamedMask> for LayerMask {
    fn from(mask: NamedMask) -> Self {
        Self::Named(mask)
    }
}

impl LayerMask {
    /// The operator's own mask.
    ///
    /// # Errors
    /// [`BACKEND_MASK`](crate::rules::BACKEND_MASK) for a rule of the caller.
    pub fn causality(&self) -> Result<Causality, Violation> {
        match self {
            Self::Causality(causality) => Ok(*causality),
            Self::Named(_) => Err(Violation::new(
                &rules::BACKEND_MASK,
                self,
                "a mask of the operator's own: bidirectional, causal, or a window",
                "add `Backend::NamedMask` in front, which computes such layers",
            )),
        }
    }

    /// The rule of the caller, if it is one.
    pub fn named(&self) -> Option<&NamedMask> {
        match self {
            Self::Causality(_) => None,
            Self::Named(mask) => Some(mask),
        }
    }

    /// Whether every token sees no earlier keys that it would not see under `other`.
    pub(crate) fn is_within(&self, other: Causality) -> bool {
        match self {
            Self::Causality(causality) => causality.is_within(other),
            Self::Named(_) => other.window().is_none(),
        }
    }
}

/// The rule of a mask: whether a token sees a key, by the request's place in the step and the positions of token and
/// key.
type Sees = dyn Fn(usize, usize, usize) -> bool + Send + Sync;

/// A mask by a rule of the caller, such as a prefix that sees itself whole, chunks, or documents that must not see
/// each other.
///
/// Clones are the same mask: one plan a step serves all layers with a clone, and clones share the tensors that are
/// kept on the device for later steps of the same lengths, up to [`KEPT_BYTES`](Self::KEPT_BYTES). Two masks that are
/// made separately are different, also under one name; the name is for errors and reports. So make a mask once, and
/// clone it for layers and steps.
///
/// **The result of the rule must depend on its arguments alone.** A kept tensor is used again for requests of the
/// same places and lengths without calling the rule, which identifies requests by their place in the step. Where the
/// same places and lengths may mean other requests, such as documents with borders of their own, make a mask for each
/// batch, or [`forget`](Self::forget) the kept tensors.
///
/// ```
/// use ascend_serving::NamedMask;
///
/// // Chunks of 64 tokens, each of which sees itself and the first four tokens.
/// let chunks = NamedMask::new("chunks of 64, 4 sinks", |_request, token, key| {
///     key <= token && (key < 4 || key / 64 == token / 64)
/// });
/// assert!(chunks.sees(0, 130, 128) && chunks.sees(0, 130, 3) && !chunks.sees(0, 130, 127));
/// ```
#[derive(Clone)]
pub struct NamedMask {
    shared: Arc<SharedMask>,
}

struct SharedMask {
    name: String,
    sees: Box<Sees>,
    kept: Mutex<KeptMasks>,
}

/// The tensors of a mask that are kept on devices.
#[derive(Default)]
struct KeptMasks {
    /// The kept tensors, the most recently used last.
    masks: Vec<KeptMask>,
    /// How often the tensors were forgotten: a tensor that was begun before is not kept.
    forgotten: u64,
}

/// The mask of some requests, `[requests, new tokens, columns]`.
struct KeptMask {
    requests: Vec<MaskedRequest>,
    columns: usize,
    mask: Mask,
}

/// A request of a step, whose new tokens are the rows of a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MaskedRequest {
    /// Its place in the step; `None` for padding, which sees all keys that it has.
    pub(crate) place: Option<usize>,
    pub(crate) new: usize,
    pub(crate) cached: usize,
}

impl NamedMask {
    /// Most bytes of masks that are kept on devices.
    pub const KEPT_BYTES: usize = 64 << 20;

    /// Makes a mask of this name. The rule is called with the request's place in the step, the position of one of its
    /// new tokens and the position of a key, both counted from the beginning of the request; keys of later tokens are
    /// included. It returns whether the token sees the key: `key <= token` is causal. (In mask tensors of the operators
    /// 1 hides a key.)
    pub fn new(name: impl Into<String>, sees: impl Fn(usize, usize, usize) -> bool + Send + Sync + 'static) -> Self {
        Self { shared: Arc::new(SharedMask { name: name.into(), sees: Box::new(sees), kept: Mutex::default() }) }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Whether a token of a request sees a key.
    pub fn sees(&self, request: usize, token: usize, key: usize) -> bool {
        (self.shared.sees)(request, token, key)
    }

    /// Drops the kept tensors, so that the rule is called again. Steps that were planned keep theirs, and so does a
    /// step that another thread is planning: its tensor is not kept for other steps.
    pub fn forget(&self) {
        let mut kept = lock(&self.shared.kept);
        kept.forgotten += 1;
        let masks = std::mem::take(&mut kept.masks);
        drop(kept);
        drop(masks);
    }

    /// Bytes of the tensors that are kept.
    pub fn kept_bytes(&self) -> usize {
        let kept = lock(&self.shared.kept);
        kept.masks.iter().map(|kept| kept.mask.tensor_bytes()).sum()
    }

    /// The mask, on the device, of requests with equally many new tokens, over `columns` key positions.
    ///
    /// # Errors
    /// [`MASK_ROWS`](crate::rules::MASK_ROWS) for a token that sees no key; the errors of making a mask; as for
    /// [`Stream::upload`](ascend_attention::Stream::upload).
    pub(crate) fn of(&self, device: &Device, requests: &[MaskedRequest], columns: usize) -> Result<Mask> {
        let is_same = |kept: &KeptMask| {
            let same = kept.columns == columns && kept.requests == requests;
            let tensor = kept.mask.tensor();
            same && tensor.is_some_and(|mask| mask.check_device("mask", device).is_ok())
        };
        let mut kept = lock(&self.shared.kept);
        if let Some(place) = kept.masks.iter().position(is_same) {
            // It is the most recently used now.
            let used = kept.masks.remove(place);
            let mask = used.mask.clone();
            kept.masks.push(used);
            return Ok(mask);
        }
        let forgotten = kept.forgotten;
        drop(kept);
        let mask = self.on_host(requests, columns)?;
        let mask = Mask::all_mask(device.masks().custom_matrix(&mask)?);
        let mut kept = lock(&self.shared.kept);
        let mut bytes = mask.tensor_bytes();
        if bytes <= Self::KEPT_BYTES && kept.forgotten == forgotten {
            let kept = &mut kept.masks;
            kept.push(KeptMask { requests: requests.to_vec(), columns, mask: mask.clone() });
            // Tensors are kept from the last one on, while they fit.
            let older = kept.iter().rev().skip(1);
            let fit = older.take_while(|older| {
                bytes += older.mask.tensor_bytes();
                bytes <= Self::KEPT_BYTES
            });
            let first = kept.len() - 1 - fit.count();
            kept.drain(..first);
        }
        Ok(mask)
    }

    /// The mask on the host, `[requests, new tokens, columns]`, a byte for each element.
    ///
    /// # Errors
    /// [`MASK_ROWS`](crate::rules::MASK_ROWS) for a token that sees no key; the errors of making a mask.
    pub(crate) fn on_host(&self, requests: &[MaskedRequest], columns: usize) -> Result<HostMask> {
        let rows = requests.first().map_or(0, |request| request.new);
        let visible = |entry: usize, row: usize, key: usize| {
            let MaskedRequest { place, new, cached } = requests[entry];
            key < cached + new && place.is_none_or(|place| self.sees(place, cached + row, key))
        };
        let mask = HostMask::stack_from_fn(requests.len(), rows, columns, MaskForm::INT8, visible)?;
        if let Some((entry, row)) = mask.fully_masked_rows().next() {
            let token = requests[entry].cached + row;
            let place = requests[entry].place.unwrap_or(entry);
            return Err(rules::MASK_ROWS
                .broken(
                    format_args!("{:?}: no key for token {token} of request {place}", self.name()),
                    "a key for each token",
                )
                .into());
        }
        Ok(mask)
    }
}

impl fmt::Debug for NamedMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NamedMask").field(&self.name()).finish()
    }
}

impl PartialEq for NamedMask {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl Eq for NamedMask {}

impl Hash for NamedMask {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.shared).hash(state);
    }
}
