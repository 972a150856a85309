//! Layers of linear attention: a pool of recurrent states, the state of a request, and steps over them.

mod request_state;
mod state_pool;
mod state_step;

pub use request_state::RequestState;
pub use state_pool::{StatePool, StateShape};
pub use state_step::StateStep;
