//! The scripts: validate first, write last, for a script that fails takes nothing back.

/// KEYS: cell. ARGV: tag, expected tag or empty, whether to issue a fence, lease and keep (or
/// empty) in microseconds, lease of the terms, record.
///
/// Numbers are written by `%.0f`: others lose digits. Durations are below 2^52 and the clock is
/// below 2^51, so that sums are exact in Lua.
pub(super) const SWAP: &str = r"
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local function text(number) return string.format('%.0f', number) end
local found = redis.call('HMGET', KEYS[1], 'tag', 'fence', 'lease', 'keep', 'record')
if found[1] == ARGV[1] then
  return {'stored', text(now), found[2], found[3]}
end
if (found[1] or '') ~= ARGV[2] then
  return {'conflict', text(now), unpack(found)}
end
local fence = tonumber(found[2] or '-1')
if ARGV[3] == '1' or not found[1] then
  fence = math.max(now, fence + 1)
end
local lease = now + tonumber(ARGV[4])
redis.call('HSET', KEYS[1], 'tag', ARGV[1], 'fence', text(fence), 'lease', text(lease),
  'keep', '', 'record', ARGV[7])
if ARGV[5] == '' then
  redis.call('PERSIST', KEYS[1])
else
  local keep = now + tonumber(ARGV[5])
  redis.call('HSET', KEYS[1], 'keep', text(keep))
  redis.call('PEXPIREAT', KEYS[1], text(math.ceil((keep + tonumber(ARGV[6])) / 1000)))
end
return {'stored', text(now), text(fence), text(lease)}
";

/// KEYS: cell.
pub(super) const LOAD: &str = r"
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000000 + tonumber(time[2]))
return {'found', now,
  unpack(redis.call('HMGET', KEYS[1], 'tag', 'fence', 'lease', 'keep', 'record'))}
";
