//! What the ranks of a step have to agree in, and the comparison of it before anything is computed.

use ascend_attention::comm::Communicator;
use ascend_attention::spec::DType;
use ascend_attention::spec::collective::digest;
use ascend_attention::{Stream, Tensor, Violation};

use crate::backends::AttentionShape;
use crate::batch::BatchRequest;
use crate::error::Result;
use crate::kv::{CacheShape, SequenceStamp};
use crate::rules;

/// A number that is the same on all ranks: what it is, and how it is written.
pub(super) type Term = (&'static str, fn(i64) -> String);

pub(super) const QUERY_HEADS: Term = ("query heads", number);
pub(super) const KEY_HEADS: Term = ("key heads", number);
pub(super) const KEY_ELEMENTS: Term = ("elements of a key", number);
pub(super) const ELEMENT_TYPE: Term =
    ("element type", |number| i32::try_from(number).ok().and_then(DType::from_acl).map_or("none", DType::name).into());
pub(super) const SCALE: Term = ("scale", factor);

/// What the attentions of all ranks have in common.
const SETTINGS: [Term; 10] = [
    ("number of requests", number),
    ("tokens in a run", number),
    ("layers", number),
    QUERY_HEADS,
    KEY_HEADS,
    KEY_ELEMENTS,
    ("elements of a value", number),
    ELEMENT_TYPE,
    SCALE,
    ("cap of the scores", factor),
];

/// What each request of a step is on all ranks, and what mends ranks that differ in it.
const REQUEST: [(Term, &str); 3] = [
    (("cached tokens", number), SEQUENCES_FIX),
    (
        ("new tokens", number),
        "begin the step again, on the ranks that have brought something else, with the same new tokens of each \
         request; the others repeat the layer",
    ),
    (("sequence", sequence), SEQUENCES_FIX),
];

/// What mends ranks whose sequences differ.
const SEQUENCES_FIX: &str = "bring the requests in the same order, no step left out or made twice; where a sequence \
     was preempted, cut or made anew on some ranks alone, do the same on the others, and compute its tokens again on \
     all; begin the step again on the ranks that change something, and repeat the layer on the others";

/// The last of all: how the step is computed, since each way exchanges other tensors.
const FORM: Term = ("step", |form| match form {
    BY_ROWS => "divided by rows".into(),
    BY_HEADS => "divided by heads".into(),
    size => format!("replayed from graphs of size {size}"),
});

/// The form of a step of which each rank passes all rows of some heads; a larger one is replayed from a graph of that
/// size.
pub(super) const BY_HEADS: i64 = 0;

/// The form of a step of which each rank passes some rows of all heads.
pub(super) const BY_ROWS: i64 = -1;

/// The number that stands for no sequence.
const NO_SEQUENCE: i64 = -1;

/// Whether a rank has begun a step, 1, or refuses it.
const STATE: Term = ("step", |state| if state == REFUSED { "refused" } else { "begun" }.into());

/// What mends a step that a rank refuses.
const REFUSED_FIX: &str =
    "begin the step on the rank that refuses it, and repeat the layer on the others; or drop the step on all ranks";

/// What mends ranks that have more or fewer requests.
const REQUESTS_FIX: &str = "begin the step again, on the ranks that have brought something else, with the same \
     requests in the same order; a request that some ranks have preempted or ended is left out on all; the others \
     repeat the layer";

/// What mends ranks that were made with other settings.
const SETTINGS_FIX: &str =
    "make the attentions of all ranks anew, with the same runs, layers, heads, element type, scale and cap";

/// What mends ranks that compute the step in other ways.
const FORM_FIX: &str =
    "begin the step on all ranks by `begin`, on all by `begin_rows`, or on all from graphs of the same sizes";

/// What a rank sends in the place of the digest of a step that it refuses. No digest is.
const REFUSED: i64 = 0;

/// Numbers that are compared at a time, once they are known to differ.
const COMPARED: usize = 64;

pub(super) fn number(number: i64) -> String {
    number.to_string()
}

fn factor(bits: i64) -> String {
    f64::from_bits(bits.cast_unsigned()).to_string()
}

fn sequence(name: i64) -> String {
    match name {
        NO_SEQUENCE => "none".into(),
        _ => format!("that of request {} in step {}", name & 0xFFFF_FFFF, name >> 32),
    }
}

/// The names of sequences, which ranks have in common where their pools have not: the step that had the sequence first,
/// and its request there.
#[derive(Debug, Default)]
pub(super) struct SequenceNames {
    /// Steps that the ranks have agreed in.
    steps: i64,
    /// By the place of a sequence in its pool: when it began, and its name.
    names: Vec<Option<(u64, i64)>>,
}

/// A step as the ranks compare it.
#[derive(Debug)]
pub(super) struct StepTerms {
    terms: Vec<i64>,
    /// The sequences of the requests, and their names.
    sequences: Vec<(SequenceStamp, i64)>,
}

impl SequenceNames {
    /// Forgets the sequences, those of a pool that is replaced.
    pub(super) fn forget(&mut self) {
        self.names.clear();
    }

    fn name(&self, stamp: SequenceStamp, request: usize) -> i64 {
        let known = self.names.get(stamp.place()).copied().flatten().filter(|(began, _)| *began == stamp.began());
        known.map_or((self.steps << 32) | request as i64, |(_, name)| name)
    }

    /// The numbers of a step.
    pub(super) fn terms(
        &self,
        (shape, cache, dtype): (AttentionShape, CacheShape, DType),
        tokens_in_run: usize,
        requests: &[BatchRequest<'_>],
        form: i64,
    ) -> StepTerms {
        let AttentionShape { heads, kv_heads, head_dim, scale, emulated_only_soft_cap } = shape;
        let numbers = [requests.len(), tokens_in_run, cache.layers, heads, kv_heads, head_dim, cache.value_dim];
        let mut terms: Vec<i64> = numbers.map(|number| number as i64).to_vec();
        let factors = [scale, emulated_only_soft_cap.unwrap_or(0.0)].map(|factor| factor.to_bits().cast_signed());
        terms.push(i64::from(dtype.acl()));
        terms.extend(factors);
        let mut sequences = Vec::with_capacity(requests.len());
        for (index, request) in requests.iter().enumerate() {
            let stamp = request.sequence.map(|sequence| sequence.stamp());
            let name = stamp.map_or(NO_SEQUENCE, |stamp| self.name(stamp, index));
            sequences.extend(stamp.map(|stamp| (stamp, name)));
            terms.extend([request.cached as i64, request.new as i64, name]);
        }
        terms.push(form);
        StepTerms { terms, sequences }
    }

    /// Takes note of a step that the ranks have agreed in.
    pub(super) fn agreed(&mut self, step: &StepTerms) {
        self.steps += 1;
        for (stamp, name) in &step.sequences {
            if self.names.len() <= stamp.place() {
                self.names.resize(stamp.place() + 1, None);
            }
            self.names[stamp.place()] = Some((stamp.began(), *name));
        }
    }
}

/// How far a rank has come in a step.
#[derive(Debug)]
pub(super) struct StepOrder {
    /// What the ranks have to agree in; `None` where they trust each other, or have agreed.
    pub(super) terms: Option<StepTerms>,
    /// Whether the other ranks go on into the step.
    begun: bool,
    /// The layer that comes next.
    next: usize,
}

impl StepOrder {
    pub(super) fn new(terms: Option<StepTerms>) -> Self {
        Self { terms, begun: false, next: 0 }
    }

    /// Refuses another layer than the next.
    pub(super) fn check(&self, layer: usize) -> Result<(), Violation> {
        match layer == self.next {
            true => Ok(()),
            false => Err(rules::RANKS_ORDER
                .broken(format_args!("layer {layer} of a step"), format_args!("layer {}, the next one", self.next))),
        }
    }

    /// Takes note that the ranks have agreed, and go on into the step.
    pub(super) fn begin(&mut self) {
        (self.terms, self.begun) = (None, true);
    }

    /// Takes note that a layer is queued.
    pub(super) fn advance(&mut self) {
        (self.begun, self.next) = (true, self.next.saturating_add(1));
    }

    /// Whether the other ranks wait for layers of the step, of which there are as many.
    pub(super) fn is_torn(&self, layers: usize) -> bool {
        self.begun && self.next < layers
    }
}

impl StepTerms {
    fn digest(&self) -> i64 {
        // Odd, so that it is not what a rank that refuses sends.
        digest(self.terms.iter().map(|term| term.cast_unsigned())).cast_signed() | 1
    }

    /// Compares the step with those of the other ranks, which all compare theirs, and waits for the stream. The
    /// difference is the same on every rank. `exchanged` says after an error whether the others may have come further.
    pub(super) fn difference(
        &self,
        communicator: &mut Communicator,
        stream: &Stream,
        exchanged: &mut bool,
    ) -> Result<Option<Violation>> {
        let digests = gather(communicator, stream, &[self.digest()], exchanged)?;
        if digests.iter().all(|digest| *digest == self.digest()) {
            return Ok(None);
        }
        if digests.contains(&REFUSED) {
            let states: Vec<i64> = digests.iter().map(|digest| digest.signum().abs()).collect();
            return Ok(Some(differing(STATE, "", &states, REFUSED_FIX)));
        }
        // The number of requests is among the first, so that ranks which differ in it come no further.
        for (at, part) in self.terms.chunks(COMPARED).enumerate() {
            let mut own = part.to_vec();
            own.resize(COMPARED, 0);
            let all = gather(communicator, stream, &own, exchanged)?;
            let of_term = |term: usize| all.iter().skip(term).step_by(COMPARED).copied().collect::<Vec<i64>>();
            let mut differing = (0..COMPARED).map(of_term).enumerate();
            let differs = |(_, values): &(usize, Vec<i64>)| values.iter().any(|value| values.first() != Some(value));
            if let Some((term, values)) = differing.find(differs) {
                return Ok(Some(named(at * COMPARED + term, self.terms.len(), &values)));
            }
        }
        let digests: Vec<String> = digests.iter().map(|digest| format!("{digest:x}")).collect();
        Ok(Some(rules::RANKS_BATCH.broken(digests.join(", "), "equal digests of the step on all ranks")))
    }
}

/// The numbers of all ranks, one rank's behind the other's. Waits for the stream and the other ranks.
pub(super) fn gather(
    communicator: &mut Communicator,
    stream: &Stream,
    own: &[i64],
    exchanged: &mut bool,
) -> Result<Vec<i64>> {
    let send = stream.upload(own, [own.len()])?;
    let all = Tensor::empty(stream.device(), [own.len() * communicator.size()])?;
    *exchanged = true;
    communicator.all_gather(stream, &send, &all)?;
    Ok(all.download(stream)?)
}

/// Takes part in a comparison as a rank that refuses the step, and waits for the others, whose first layer is refused.
pub(super) fn refuse(communicator: &mut Communicator, stream: &Stream, exchanged: &mut bool) -> Result<()> {
    gather(communicator, stream, &[REFUSED], exchanged).map(drop)
}

/// The refusal of a number that the ranks have other values of.
#[cold]
fn named(at: usize, terms: usize, values: &[i64]) -> Violation {
    let (term, whose, fix) = match at.checked_sub(SETTINGS.len()) {
        None => (SETTINGS[at], String::new(), if at == 0 { REQUESTS_FIX } else { SETTINGS_FIX }),
        Some(_) if at + 1 == terms => (FORM, String::new(), FORM_FIX),
        Some(at) => {
            let (term, fix) = REQUEST[at % REQUEST.len()];
            (term, format!(" of request {}", at / REQUEST.len()), fix)
        }
    };
    differing(term, &whose, values, fix)
}

/// The refusal of a number that the ranks have other values of: which ranks have which.
#[cold]
pub(super) fn differing((what, text): Term, whose: &str, values: &[i64], fix: &'static str) -> Violation {
    let mut by_value: Vec<(i64, Vec<String>)> = Vec::new();
    for (rank, value) in values.iter().enumerate() {
        let rank = rank.to_string();
        match by_value.iter_mut().find(|(known, _)| known == value) {
            Some((_, ranks)) => ranks.push(rank),
            None => by_value.push((*value, vec![rank])),
        }
    }
    let texts = by_value.iter().map(|(value, ranks)| {
        let word = if ranks.len() == 1 { "rank" } else { "ranks" };
        format!("{} on {word} {}", text(*value), ranks.join(", "))
    });
    let given = format!("{what}{whose}: {}", texts.collect::<Vec<_>>().join("; "));
    Violation::new(&rules::RANKS_BATCH, given, "the same on every rank", fix)
}
