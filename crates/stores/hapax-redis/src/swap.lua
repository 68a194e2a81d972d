-- Writes a record if it has the expected write id; otherwise returns the record.
--
-- A script that fails is not rolled back, so everything is checked first, and one SET writes. What
-- follows it cannot fail. Errors have codes of our own, because the text of an error within a script
-- differs by the server's version:
--   HAPAX       the key has another value than a record; nothing was written
--   NOTWRITTEN  a command was rejected; nothing was written
--   READONLY    the same, by a replica
--
-- KEYS[1]  the record; also the channel of its notifications
-- ARGV[1]  new write id: 16 bytes
-- ARGV[2]  expected write id; empty if no record is expected
-- ARGV[3]  1 to issue a fence, 0 to keep the present one
-- ARGV[4]  lease, in microseconds from now
-- ARGV[5]  retention, in microseconds from now; empty for ever
-- ARGV[6]  time after the retention until the record may be removed, in microseconds
-- ARGV[7]  1 to notify waiters
-- ARGV[8]  the sealed record
-- KEYS[2], ARGV[9]  both or neither: name of the store's identity, and the identity without which no
--                   new record is written
--
-- A reply begins with its kind (S stored, C conflict, R replaced identity) and the new write id, so that
-- a reply to another request is detected.
--
-- Format of a record: 'hxc1', its write id, and four numbers of 16 digits (fence; end of the lease; end
-- of the retention; time from which it may be removed; nines for never), then the sealed record.
local MAGIC, HEAD = 'hxc1', 84
local NEVER = '9999999999999999'
-- Numbers are doubles, exact up to here: microseconds until the year 2255.
local LAST = 9007199254740991

local function digits(number)
  return string.format('%016.0f', math.min(number, LAST))
end

local function rejected(reply)
  local code = 'NOTWRITTEN '
  if string.find(reply.err, 'WRONGTYPE', 1, true) then
    code = 'HAPAX '
  elseif string.find(reply.err, 'READONLY', 1, true) then
    code = 'READONLY '
  end
  return redis.error_reply(code .. reply.err)
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local head = redis.pcall('GETRANGE', KEYS[1], 0, HEAD - 1)
if type(head) == 'table' then
  return rejected(head)
end
local write_id, fence = '', 0
if head ~= '' then
  local due = tonumber(string.sub(head, 69, 84))
  fence = tonumber(string.sub(head, 21, 36))
  if string.sub(head, 1, 4) ~= MAGIC or not due or not fence then
    return redis.error_reply('HAPAX the key has another value than a record')
  end
  -- After this time the server may remove it at any moment, so it counts as absent: the server's own
  -- expiry is rounded, and late.
  if now < due then
    write_id = string.sub(head, 5, 20)
  end
end

if write_id == ARGV[1] then
  return {'S', ARGV[1], digits(now), string.sub(head, 21, 36), string.sub(head, 37, 52)}
end
if write_id ~= ARGV[2] then
  return {'C', ARGV[1], digits(now), write_id ~= '' and redis.call('GET', KEYS[1])}
end

if ARGV[9] and write_id == '' then
  local identity = redis.pcall('GET', KEYS[2])
  if type(identity) ~= 'string' or string.sub(identity, 1, 32) ~= ARGV[9] then
    return {'R', ARGV[1]}
  end
end

if ARGV[3] == '1' or write_id == '' then
  fence = math.max(now, fence + 1)
end
fence = digits(fence)
local lease = digits(now + ARGV[4])
local keep, due = NEVER, NEVER
if ARGV[5] ~= '' then
  keep = digits(now + ARGV[5])
  due = digits(math.min(now + ARGV[5], LAST) + ARGV[6])
end
local record = MAGIC .. ARGV[1] .. fence .. lease .. keep .. due .. ARGV[8]
local done
if due == NEVER then
  done = redis.pcall('SET', KEYS[1], record)
else
  -- The first millisecond in which it may be removed, or a later one.
  local at = string.format('%.0f', math.floor(due / 1000) + 1)
  done = redis.pcall('SET', KEYS[1], record, 'PXAT', at)
end
if done.err then
  return rejected(done)
end
if ARGV[7] == '1' then
  -- Waiters also poll, so that a failure is harmless.
  redis.pcall('PUBLISH', KEYS[1], '')
end
return {'S', ARGV[1], digits(now), fence, lease}
