//! Masks by the names that configurations and flags have.

use std::num::NonZeroUsize;
use std::str::FromStr;

use ascend_attention::Violation;
use ascend_attention::spec::MaskGeometry;
use ascend_attention::spec::geometry::{TriangleMix, TrianglePart, TriangleRows};

use crate::causality::Causality;
use crate::rules;

use super::layer_mask::{LayerMask, NamedMask};

/// A kind of mask: its name, the names of its parameters, and what makes it of them and its whole text.
type Kind = (&'static str, &'static [&'static str], fn(&[NonZeroUsize], &str) -> Option<LayerMask>);

const KINDS: [Kind; 6] = [
    ("bidirectional", &[], |_, _| Some(Causality::Bidirectional.into())),
    ("causal", &[], |_, _| Some(Causality::Causal.into())),
    ("window", &["KEYS"], |sizes, _| Some(Causality::Window(*sizes.first()?).into())),
    ("chunk", &["TOKENS"], |sizes, _| Some(Causality::Chunk(*sizes.first()?).into())),
    ("prefix", &["KEYS"], |sizes, text| {
        let prefix = sizes.first()?.get() as u64;
        Some(named(text, move |tokens| MaskGeometry::prefix(tokens, tokens, prefix)))
    }),
    ("sinks", &["SINKS", "KEYS"], |sizes, text| {
        let [sinks, window] = [sizes.first()?, sizes.get(1)?].map(|size| size.get() as u64);
        let sizes = TriangleMix::new(sinks, window.saturating_sub(1), 0);
        Some(named(text, move |tokens| sizes.geometry(TrianglePart::Streaming, TriangleRows::whole(tokens))))
    }),
];

/// A mask of this name, by the geometry of a whole sequence of some tokens.
fn named(name: &str, geometry: impl Fn(u64) -> MaskGeometry + Send + Sync + 'static) -> LayerMask {
    let sees = move |_: usize, token: usize, key: usize| {
        let tokens = (token.max(key) as u64).saturating_add(1);
        geometry(tokens).sees(token as u64, key as u64)
    };
    LayerMask::Named(NamedMask::new(name, sees))
}

/// Reads a mask by its name and parameters, divided by colons, as configurations and flags have it:
///
/// | text | a token sees |
/// |---|---|
/// | `bidirectional` | every key |
/// | `causal` | its own key and those before |
/// | `window:KEYS` | the last keys up to its own, at most this number |
/// | `chunk:TOKENS` | its own key and those before in its chunk |
/// | `prefix:KEYS` | its own key, those before, and the first keys of the request, also later ones (prefix models) |
/// | `sinks:SINKS:KEYS` | the first keys of the request, and the last ones up to its own (StreamingLLM) |
///
/// The first four are a [`Causality`], the others a [`NamedMask`] whose name is the text. Read one once: masks that are
/// read separately are different, and have plans and tensors of their own.
///
/// ```
/// use ascend_serving::LayerMask;
///
/// let mask: LayerMask = "sinks:4:64".parse()?;
/// let named = mask.named().map(|mask| (mask.sees(0, 100, 3), mask.sees(0, 100, 4), mask.sees(0, 100, 37)));
/// assert_eq!(named, Some((true, false, true)));
/// # Ok::<(), ascend_serving::Violation>(())
/// ```
impl FromStr for LayerMask {
    type Err = Violation;

    /// # Errors
    /// [`MASK_TEXT`](crate::rules::MASK_TEXT) for another name, for another number of parameters, and for one that is
    /// no number from 1 on.
    fn from_str(text: &str) -> Result<Self, Violation> {
        let mut parts = text.split(':').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let sizes = parts.map(str::parse).collect::<Result<Vec<NonZeroUsize>, _>>().ok();
        let kind = KINDS.iter().find(|(kind, ..)| *kind == name);
        let made = kind.zip(sizes).and_then(|((_, parameters, make), sizes)| {
            (sizes.len() == parameters.len()).then(|| make(&sizes, text))?
        });
        made.ok_or_else(|| unknown(text))
    }
}

#[cold]
fn unknown(text: &str) -> Violation {
    let forms = KINDS.map(|(name, parameters, _)| [&[name], parameters].concat().join(":"));
    rules::MASK_TEXT.broken(format_args!("{text:?}"), format_args!("one of {}", forms.join(", ")))
}

/// For configurations: `#[serde(try_from = "String")]`.
impl TryFrom<String> for LayerMask {
    type Error = Violation;

    fn try_from(text: String) -> Result<Self, Violation> {
        text.parse()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn masks_are_read_by_name_and_parameters() {
        let size = |size| NonZeroUsize::new(size).unwrap();
        for (text, causality) in [
            ("bidirectional", Causality::Bidirectional),
            ("causal", Causality::Causal),
            ("window: 7", Causality::Window(size(7))),
            ("chunk:8192", Causality::Chunk(size(8192))),
        ] {
            assert_eq!(text.parse::<LayerMask>().unwrap(), causality.into(), "{text}");
        }
        for wrong in ["", "Causal", "causal:1", "window", "window:0", "window:-1", "sinks:4", "sinks:4:5:6", "chunk:x"]
        {
            let refused = LayerMask::try_from(wrong.to_owned()).unwrap_err();
            assert_eq!(refused.rule, &rules::MASK_TEXT, "{wrong}");
            assert!(refused.allowed.contains("sinks:SINKS:KEYS"), "{refused}");
        }
    }

    proptest! {
        #[test]
        fn named_masks_are_their_definitions(
            first in 1usize..12,
            window in 1usize..12,
            token in prop_oneof![0usize..40, Just(usize::MAX)],
            key in prop_oneof![0usize..40, Just(usize::MAX)],
        ) {
            let sees = |text: String| text.parse::<LayerMask>().unwrap().named().unwrap().sees(3, token, key);
            prop_assume!(token < 40 || key < 40);
            let before = key <= token;
            if token < 40 && key < 40 {
                prop_assert_eq!(sees(format!("prefix:{first}")), before || key < first);
                let shown = before && (key < first || token - key < window);
                prop_assert_eq!(sees(format!("sinks:{first}:{window}")), shown);
            } else {
                // No position makes a rule panic.
                let _ = (sees(format!("prefix:{first}")), sees(format!("sinks:{first}:{window}")));
            }
        }
    }
}
