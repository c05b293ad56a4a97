use crate::element::Element;
use crate::view::{AnyViewMut, TensorMut, View, ViewMut};

/// The outputs of [`Attention::backward`](crate::Attention::backward): gradients of q, k and v, each
/// of its shape, in the element type of the problem or in [`f32`].
#[derive(Debug)]
pub struct Gradients<'a, 'b, G> {
    /// Of q.
    pub dq: &'a mut TensorMut<'b, G>,
    /// Of k, summed over the query heads that share a head of k.
    pub dk: &'a mut TensorMut<'b, G>,
    /// Of v, likewise.
    pub dv: &'a mut TensorMut<'b, G>,
}

/// What [`Attention::backward_with`](crate::Attention::backward_with) takes and writes beyond what
/// every backward pass does.
#[derive(Debug, Default)]
pub struct Extras<'a> {
    pub(crate) accumulate: bool,
    pub(crate) d_lse: Option<View<'a, f32, 3>>,
    pub(crate) delta: Option<Delta<'a>>,
    pub(crate) d_bias: Option<AnyViewMut<'a, 4>>,
    pub(crate) d_sinks: Option<AnyViewMut<'a, 1>>,
}

#[derive(Debug)]
pub(crate) enum Delta<'a> {
    Given(View<'a, f32, 3>),
    Wanted(ViewMut<'a, f32, 3>),
}

impl<'a> Extras<'a> {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds into the gradients of q, k and v, which must be of [`f32`].
    pub fn accumulate(mut self) -> Self {
        self.accumulate = true;
        self
    }

    /// The gradient of the LSE, of its shape and strides.
    pub fn d_lse(mut self, d_lse: View<'a, f32, 3>) -> Self {
        self.d_lse = Some(d_lse);
        self
    }

    /// Writes each row's sum of `o * d_o`, of the LSE's shape and strides.
    pub fn delta(mut self, delta: &'a mut ViewMut<'_, f32, 3>) -> Self {
        self.delta = Some(Delta::Wanted(delta.reborrow()));
        self
    }

    /// Takes each row's sum of `o * d_o` from here. The values of `o` are not read then: any tensor
    /// of its shape will do.
    pub fn given_delta(mut self, delta: View<'a, f32, 3>) -> Self {
        self.delta = Some(Delta::Given(delta));
        self
    }

    /// Writes the gradient of the bias, of its element type, shape and strides, summed where the bias
    /// repeats.
    pub fn d_bias<D: Element>(mut self, d_bias: &'a mut ViewMut<'_, D, 4>) -> Self {
        self.d_bias = Some(d_bias.reborrow().erase());
        self
    }

    /// Writes the gradient of the sinks, of their element type, `[heads]`.
    pub fn d_sinks<D: Element>(mut self, d_sinks: &'a mut ViewMut<'_, D, 1>) -> Self {
        self.d_sinks = Some(d_sinks.reborrow().erase());
        self
    }
}
