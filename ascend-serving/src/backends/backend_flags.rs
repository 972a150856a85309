//! Backends by the names that they print, as flags and configurations of engines have them.

use std::str::FromStr;

use ascend_attention::{Device, Element, Violation};

use crate::batch::AttentionState;
use crate::rules;

use super::backend::Backend;
use super::registry::Backends;

/// Reads names as [`Backends::names`] prints them, divided by commas, in the order in which they are to be tried; those
/// with settings as [`Backend`] reads them.
///
/// ```
/// use ascend_attention::bf16;
/// use ascend_serving::Backends;
///
/// # fn main() -> Result<(), ascend_serving::Violation> {
/// let backends: Backends<bf16> = "split_decode:256,fused".parse()?;
/// assert_eq!(backends.names().collect::<Vec<_>>(), ["split_decode", "fused"]);
/// # Ok(())
/// # }
/// ```
impl<T: Element> FromStr for Backends<T> {
    type Err = Violation;

    /// # Errors
    /// [`BACKEND_KNOWN`](crate::rules::BACKEND_KNOWN) for another name, and for one that was named before.
    fn from_str(names: &str) -> Result<Self, Violation> {
        let mut backends = Self::none();
        for name in names.split(',').map(str::trim) {
            let backend = name.parse::<Backend>()?;
            if backends.get(backend.name()).is_some() {
                let allowed = format!("each name once, {}", Backend::known_names());
                return Err(rules::BACKEND_KNOWN.broken(format_args!("{name:?} a second time"), allowed));
            }
            backends = backends.with(backend);
        }
        Ok(backends)
    }
}

/// The backends that an engine's flags choose. A flag has the name of a backend, or several ([`Backends::from_str`]).
///
/// The flag of a kind of step decides for it, otherwise that of all, otherwise the device:
///
/// | steps | flags, the first that is given |
/// |---|---|
/// | [`DecodeOnly`](AttentionState::DecodeOnly): every request adds a token, not all their first | `decode`, `all` |
/// | [`SpecDecoding`](AttentionState::SpecDecoding): drafts are verified | `verify`, `prefill`, `all` |
/// | others | `prefill`, `all` |
/// | no flag | [`Backends::standard`] |
///
/// So SGLang resolves `--decode-attention-backend`, `--prefill-attention-backend` and `--attention-backend`; there
/// `speculative_attention_mode` chooses for drafts one of the former two. A flag binds: where its backends do not serve
/// a step, no other one does, and the error says why. A backend of your own serves steps without a flag
/// ([`Backends::with`]), and those of a kind by [`Backends::for_steps`]. The model needs no flag: each backend of the
/// standard list refuses the layers that it does not serve, latents, caches of 8 bits and masks among them, and
/// [`Attention::backend_choices`](crate::Attention::backend_choices) reports which ones would serve a model.
///
/// ```
/// use ascend_attention::{Runtime, bf16};
/// use ascend_serving::{BackendFlags, Backends};
///
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let device = Runtime::emulated()?.device(0)?;
/// let flags = BackendFlags { decode: Some("paged_decode"), ..BackendFlags::default() };
/// let backends: Backends<bf16> = flags.backends(&device)?;
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackendFlags<'a> {
    /// For every kind of step: `--attention-backend`.
    pub all: Option<&'a str>,
    /// For prompts, whole or in chunks, and mixed steps: `--prefill-attention-backend`.
    pub prefill: Option<&'a str>,
    /// For steps in which every request adds one token, not all of them their first: `--decode-attention-backend`.
    pub decode: Option<&'a str>,
    /// For steps that verify drafts.
    pub verify: Option<&'a str>,
}

impl BackendFlags<'_> {
    /// The backends for a device.
    ///
    /// # Errors
    /// [`BACKEND_KNOWN`](crate::rules::BACKEND_KNOWN) for a flag with another name, also where no step comes to it.
    pub fn backends<T: Element>(&self, device: &Device) -> Result<Backends<T>, Violation> {
        let parse = |flag: Option<&str>| flag.map(str::parse::<Backends<T>>).transpose();
        let [all, prefill, decode, verify] = [self.all, self.prefill, self.decode, self.verify].map(parse);
        let (all, prefill, decode, verify) = (all?, prefill?, decode?, verify?);
        let prompts = |state: &AttentionState| {
            let (decodes, verifies) = (AttentionState::DecodeOnly, AttentionState::SpecDecoding);
            *state != decodes && (*state != verifies || verify.is_none())
        };
        let prompts: Vec<_> = AttentionState::ALL.into_iter().filter(prompts).collect();
        let flags =
            [(prefill, &*prompts), (decode, &[AttentionState::DecodeOnly]), (verify, &[AttentionState::SpecDecoding])];
        let backends = all.unwrap_or_else(|| Backends::standard(device));
        Ok(flags.into_iter().fold(backends, |backends, (own, states)| match own {
            Some(own) => backends.for_steps(states, own),
            None => backends,
        }))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use ascend_attention::bf16;

    #[test]
    fn names_are_read_as_backends_print_them() {
        let read = |names: &str| -> Result<Vec<_>, Violation> {
            let backends: Backends<bf16> = names.parse()?;
            Ok(backends.names().collect())
        };
        let all = "fused,fused_in_two,paged_decode,batched_queries,cascade_prefill,shared_prefix_decode,\
                   prompt_and_incre,chunked_local,named_mask,quantised_decode,quantised_prefill,mxfp8,mla,\
                   quantised_mla";
        assert_eq!(read(all).unwrap().join(","), all);
        for names in ["fused, split_decode:16", "fused, split_decode:512:8"] {
            assert_eq!(read(names).unwrap(), ["fused", "split_decode"]);
        }
        for wrong in [
            "",
            "flash",
            "fused,",
            "fused,fused",
            "split_decode",
            "split_decode:0",
            "split_decode:x",
            "split_decode:+5",
            "split_decode:05",
            "split_decode:256:+8",
            "split_decode:256:08",
            "split_decode:1:0",
            "fused:2",
        ] {
            let refused = read(wrong).unwrap_err();
            assert_eq!(refused.rule, &rules::BACKEND_KNOWN, "{wrong:?}");
            assert!(refused.to_string().contains("split_decode:256"), "{refused}");
        }
    }

    #[cfg(feature = "emulation")]
    #[test]
    fn flags_bind_by_kind_of_step() {
        use ascend_attention::Runtime;

        use AttentionState::{ChunkedPrefill, DecodeOnly, PrefillCacheHit, PrefillNoCache, SpecDecoding};
        let device = Runtime::emulated().unwrap().device(0).unwrap();
        let order = |flags: BackendFlags<'_>, state| {
            let backends = flags.backends::<bf16>(&device).unwrap();
            backends.in_order(0, state).map(|backend| backend.name()).collect::<Vec<_>>().join(",")
        };
        let [none, all] = [None, Some("fused")];
        let flags = |all, prefill, decode, verify| BackendFlags { all, prefill, decode, verify };
        let [prefill, decode, verify] = [Some("cascade_prefill,fused"), Some("paged_decode"), Some("batched_queries")];
        let standard = Backends::<bf16>::standard(&device).names().collect::<Vec<_>>().join(",");
        let standard = standard.as_str();
        for (flags, [prefilled, decoded, verified]) in [
            (flags(none, none, none, none), [standard; 3]),
            (flags(all, none, none, none), ["fused"; 3]),
            (flags(none, none, decode, none), [standard, "paged_decode", standard]),
            (flags(all, none, decode, none), ["fused", "paged_decode", "fused"]),
            (flags(none, prefill, none, none), ["cascade_prefill,fused", standard, "cascade_prefill,fused"]),
            (flags(all, prefill, decode, verify), ["cascade_prefill,fused", "paged_decode", "batched_queries"]),
        ] {
            for state in [PrefillNoCache, PrefillCacheHit, ChunkedPrefill] {
                assert_eq!(order(flags, state), prefilled, "{flags:?}");
            }
            assert_eq!((&*order(flags, DecodeOnly), &*order(flags, SpecDecoding)), (decoded, verified), "{flags:?}");
        }
        let wrong = flags(all, prefill, decode, Some("flash")).backends::<bf16>(&device).unwrap_err();
        assert_eq!(wrong.rule, &rules::BACKEND_KNOWN);
        // What a layer prefers comes first among those of the step, and the first of two lists stays.
        let both = Backends::<bf16>::none().for_steps(&[DecodeOnly], "fused,paged_decode".parse().unwrap());
        let both = both.append(Backends::standard(&device));
        let both = both.append(Backends::none().for_steps(&[DecodeOnly], "mla".parse().unwrap()));
        assert_eq!(both.in_order(0, ChunkedPrefill).count(), standard.split(',').count());
        let both = both.prefer([0], &[DecodeOnly], "paged_decode").unwrap();
        let names = |backends: &Backends<bf16>| {
            backends.in_order(0, DecodeOnly).map(|backend| backend.name()).collect::<Vec<_>>()
        };
        assert_eq!(names(&both), ["paged_decode", "fused"]);
        // A preference that no such step would come to is refused, and other lists end it.
        let again = "paged_decode,fused".parse().unwrap();
        let again = both.for_steps(&[DecodeOnly], again);
        let both = "fused,paged_decode".parse().unwrap();
        assert_eq!(names(&again.for_steps(&[DecodeOnly], both)), ["fused", "paged_decode"]);
        let decode = Backends::<bf16>::standard(&device).for_steps(&[DecodeOnly], "fused".parse().unwrap());
        assert_eq!(decode.prefer([0], &[DecodeOnly], "mla").unwrap_err().rule, &rules::BACKEND_NAME);
    }
}
