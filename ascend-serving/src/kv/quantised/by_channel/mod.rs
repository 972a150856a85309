//! A scale for each head and element, the same for all tokens.

mod channel_quantiser;
mod channel_scales;

pub(crate) use channel_quantiser::ChannelQuantiser;
pub use channel_scales::ChannelScales;
pub(in crate::kv) use channel_scales::DeviceScales;
